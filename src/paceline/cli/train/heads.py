"""`paceline train medusa`, `eagle`, `eagle3`, `dflash`: heads on a model's features, adversarially if you like."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from paceline.cli.options import grouped
from paceline.cli.train.run import Training, run
from paceline.errors import require

if TYPE_CHECKING:
    from paceline.training.heads.adversarial import AdversarialOptions
    from paceline.training.heads.prepare import PreparedTraining, TrainingPlan


def _option(*names: str, help: str, **more: Any) -> Any:
    return Option(*names, help=help, rich_help_panel="Head", **more)


ROLLOUT = _option("--rollout", help="Drafting steps to learn: 1 on the model's states; above, on its own too.")
FADING = _option("--fading", help="Weight of a step, relative to the one before it.")
TAPS = _option("--taps", help="Which hidden states it reads, as 2,15,27; default some from a low to a late one.")


@dataclass(frozen=True)
class Head:
    """What both kinds have."""

    layers: Annotated[int, _option("--layers", "-K", help="Layers of the head.")] = 1
    vocab: Annotated[int, _option("--vocab", help="Tokens it can draft, the most frequent ones; 0: all.")] = 7168
    init: Annotated[
        str, _option("--init", help="Folder of a trained head of this kind to go on from, with its vocabulary.")
    ] = ""
    adversarial: Annotated[
        float, _option("--adversarial", help="KOALA's lambda, the weight of fooling a discriminator; 0: none.")
    ] = 0.0
    discriminator: Annotated[
        Literal["full", "low-cost"],
        _option("--discriminator", help="Reads logits, as in the paper, or the expected embedding."),
    ] = "low-cost"
    discriminator_layers: Annotated[
        int | None, _option("--discriminator-layers", help="Of its stack; default as the head has.")
    ] = None
    discriminator_lr: Annotated[
        float, _option("--discriminator-lr", help="Its learning rate, relative to the head's.")
    ] = 0.1
    patience: Annotated[
        int, _option("--patience", help="Measurements at equilibrium, in a row, that end training; 0: never.")
    ] = 0

    def options(self, training: Training, stored: bool) -> dict[str, Any]:
        """Fields of `HeadOptions`."""
        return {"layers": self.layers, "init": self.init, **training.task(self.vocab, stored)}

    def game(self) -> AdversarialOptions | None:
        """Raises OptionError for what is out of range."""
        from paceline.training.heads.adversarial import AdversarialOptions

        require(0 <= self.adversarial < inf, f"adversarial must be >= 0 and finite, not {self.adversarial}")
        if not self.adversarial:
            for name in ("discriminator", "discriminator_layers", "discriminator_lr", "patience"):
                given = getattr(self, name) != getattr(Head, name)
                require(not given, f"--{name.replace('_', '-')} is of adversarial learning: give --adversarial, too")
            return None
        layers = self.layers if self.discriminator_layers is None else self.discriminator_layers
        return AdversarialOptions(self.adversarial, self.discriminator, layers, self.discriminator_lr, self.patience)


@grouped
def medusa(
    training: Training,
    head: Head,
    heads: Annotated[int, _option("--heads", help="How many tokens ahead they guess.")] = 4,
    vocabulary: Annotated[
        Literal["own", "shared", "target"],
        _option("--vocabulary", help="Vocabulary layers: each head its own, one for all, or the model's, not trained."),
    ] = "shared",
) -> None:
    """Train the heads of the drafter medusa; runs under `accelerate launch` and `torchrun` too."""

    def prepare(plan: TrainingPlan, stored: bool) -> PreparedTraining:
        from paceline.training.heads.medusa import MedusaOptions, prepare_medusa

        options = MedusaOptions(heads=heads, vocabulary=vocabulary, **head.options(training, stored))
        return prepare_medusa(training.model, training.data, options, plan, head.game())

    run(training, prepare)


@grouped
def eagle(
    training: Training,
    head: Head,
    regression: Annotated[float, _option("--regression", help="Weight of the distance to the model's features.")] = 1.0,
    noise: Annotated[float, _option("--noise", help="To add to the features, relative to their size.")] = 0.1,
    rollout: Annotated[int, ROLLOUT] = 3,
    fading: Annotated[float, FADING] = 0.8,
) -> None:
    """Train EAGLE's head for the drafter eagle; runs under `accelerate launch` and `torchrun` too."""

    def prepare(plan: TrainingPlan, stored: bool) -> PreparedTraining:
        from paceline.training.heads.eagle import EagleOptions, prepare_eagle

        common = head.options(training, stored)
        options = EagleOptions(regression=regression, noise=noise, rollout=rollout, fading=fading, **common)
        return prepare_eagle(training.model, training.data, options, plan, head.game())

    run(training, prepare)


@grouped
def eagle3(
    training: Training,
    head: Head,
    taps: Annotated[str, TAPS] = "",
    token: Annotated[
        Literal["beside", "added"],
        _option("--token", help="The next token stands beside the state, as in EAGLE-3, or is added to it."),
    ] = "beside",
    shallow: Annotated[
        int,
        _option("--shallow", help="The token comes in as its state after so many of the model's layers; 0: embedded."),
    ] = 0,
    noise: Annotated[float, _option("--noise", help="To add to these states, relative to their size.")] = 0.0,
    rollout: Annotated[int, ROLLOUT] = 3,
    fading: Annotated[float, FADING] = 0.8,
) -> None:
    """Train EAGLE-3's head for the drafter eagle; runs under `accelerate launch` and `torchrun` too."""

    def prepare(plan: TrainingPlan, stored: bool) -> PreparedTraining:
        from paceline.training.heads.eagle import Eagle3Options, prepare_eagle3

        common = head.options(training, stored) | {"taps": _numbers(taps), "token": token, "shallow": shallow}
        options = Eagle3Options(noise=noise, rollout=rollout, fading=fading, **common)
        return prepare_eagle3(training.model, training.data, options, plan, head.game())

    run(training, prepare)


@grouped
def dflash(
    training: Training,
    head: Head,
    block: Annotated[int, _option("--block", help="Tokens of a block, the known one included.")] = 8,
    taps: Annotated[str, TAPS] = "",
    mask: Annotated[
        int | None, _option("--mask", help="Token that stands for unknown ones; default the model's last.")
    ] = None,
    inner: Annotated[int | None, _option("--inner", help="Width of the layers' MLPs; default as the model's.")] = None,
    every: Annotated[int, _option("--every", help="Tokens of text for each block that is learnt.")] = 4,
    fading: Annotated[float, _option("--fading", help="Weight of a place, relative to the one before it.")] = 0.8,
) -> None:
    """Train DFlash's head for the drafter dflash; runs under `accelerate launch` and `torchrun` too."""

    def prepare(plan: TrainingPlan, stored: bool) -> PreparedTraining:
        from paceline.training.heads.dflash import DFlashOptions, prepare_dflash

        common = head.options(training, stored) | {"taps": _numbers(taps), "mask": mask, "inner": inner}
        options = DFlashOptions(block=block, every=every, fading=fading, **common)
        return prepare_dflash(training.model, training.data, options, plan, head.game())

    run(training, prepare)


def _numbers(taps: str) -> tuple[int, ...]:
    given = taps.split(",") if taps else []
    require(all(tap.strip().isdecimal() for tap in given), f"taps must be numbers as in 2,15,27, not '{taps}'")
    return tuple(map(int, given))
