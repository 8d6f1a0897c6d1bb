"""`paceline train stop-predictor`: the predictors of Cali-TS, SpecDec++ and DISCO, by binary cross-entropy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from paceline.errors import DataError, OptionError, TrainingError, require
from paceline.policies.predictor_file import Origin
from paceline.policies.predictors import (
    STEPS,
    FeaturePredictor,
    HiddenPredictor,
    Predictor,
    ResidualPredictor,
    Seen,
    TopPredictor,
)
from paceline.training.task import LARGEST

if TYPE_CHECKING:
    from paceline.training.stop_predictor.examples import Examples

#: Forms of each policy's predictor, the default first.
FORMS = {"cali-ts": ("features", "low-rank", "full"), "specdec++": ("residual",), "disco": ("top",)}
WITHOUT_HIDDEN = ("features", "top")  # forms that need no hidden states


@dataclass(frozen=True)
class FitConfig:
    """How a predictor is trained.

    Args:
        form: see `FORMS`; None: the policy's default.
        rank: of the matrices W^i in the low-rank form.
        units: of the hidden layer in W_p's place (EESD, Algorithm 3); 1: none, W_p is linear (eq. 5).
        rejection_weight: of rejected tokens in the loss; None: 6 for SpecDec++, as in its paper, else 1.
        lr: None: 0.02 for the few weights of `features`, else 0.001.
        held_back: share of the prompts that is not trained on.
    """

    form: str | None = None
    rank: int = 32
    units: int = 1
    epochs: int = 20
    batch: int = 256
    lr: float | None = None
    weight_decay: float = 0.01
    rejection_weight: float | None = None
    held_back: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rank", "units", "epochs", "batch"):
            require(getattr(self, name) >= 1, f"{name} must be >= 1, not {getattr(self, name)}")
        require(self.lr is None or 0 < self.lr <= LARGEST, f"lr must be > 0 and at most {LARGEST:g}, not {self.lr}")
        require(self.weight_decay >= 0, f"weight_decay must be >= 0, not {self.weight_decay}")
        require(0 < self.held_back < 1, f"held_back must lie between 0 and 1, not {self.held_back}")
        weight = self.rejection_weight
        require(weight is None or 0 < weight < inf, f"rejection_weight must be > 0 and finite, not {weight}")


class Factored(nn.Module):
    """Eq. 5 as it is trained: matrices W^i, full or U^i V^i, under W_p. `fold` multiplies them out.

    The left half of W_p and the products become the `target` of a `HiddenPredictor`, whose other parts are trained
    in place.
    """

    def __init__(self, predictor: HiddenPredictor, rank: int | None) -> None:
        super().__init__()
        width, units = predictor.shape["width"], predictor.shape["units"]
        self.predictor = predictor
        self.left = nn.Parameter(torch.zeros(units, width) if units == 1 else torch.randn(units, width) / width**0.5)
        self.wide: nn.Parameter | None = None
        if rank is None:
            self.narrow = nn.Parameter(torch.eye(width).repeat(STEPS, 1, 1))
        else:
            self.narrow = nn.Parameter(torch.randn(STEPS, rank, width) / width**0.5)
            self.wide = nn.Parameter(torch.randn(STEPS, width, rank) / rank**0.5)
        predictor.target.requires_grad_(False)

    def product(self) -> Float[Tensor, "steps units width"]:
        return (self.left if self.wide is None else self.left @ self.wide) @ self.narrow

    def forward(self, seen: Seen) -> Tensor:
        out: Tensor = functional_call(self.predictor, {"target": self.product()}, (seen,))
        return out

    def fold(self) -> HiddenPredictor:
        self.predictor.target.data = self.product().detach()
        return self.predictor


class FitProgress(NamedTuple):
    epoch: int
    of: int
    loss: float  # of training, in this epoch
    held_back: float  # loss of the held-back prompts after it


def fit(
    policy: str, examples: Examples, config: FitConfig, progress: Callable[[FitProgress], None] = lambda _: None
) -> tuple[Predictor, Origin]:
    """Train a policy's predictor; the state with the least held-back loss is kept.

    Returns:
        The predictor and, as its origin, how it was made and what it gives on the held-back prompts.

    Raises:
        OptionError: a form that the policy does not have, or for which the drafter shows no hidden states.
        DataError: too few examples, or all alike.
        TrainingError: the loss is not a number.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return _fit(policy, examples, config, progress)


def _fit(
    policy: str, examples: Examples, config: FitConfig, progress: Callable[[FitProgress], None]
) -> tuple[Predictor, Origin]:
    model = _model(policy, examples, config)
    train, test = _split(examples, config)
    _prepare(model.predictor if isinstance(model, Factored) else model, examples, train)
    weight = config.rejection_weight or (6.0 if policy == "specdec++" else 1.0)
    held = examples.seen(test), examples.accepted[test]
    with torch.no_grad():
        best = _finite(_loss(model, *held, weight), 0).item()
    kept, epoch_kept = copy.deepcopy(model.state_dict()), 0
    optimiser = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=config.lr or (2e-2 if isinstance(model, FeaturePredictor) else 1e-3),
        weight_decay=config.weight_decay,
    )
    for epoch in range(1, config.epochs + 1):
        losses = []
        for rows in train[torch.randperm(len(train))].split(config.batch):
            loss = _finite(_loss(model, examples.seen(rows), examples.accepted[rows], weight), epoch)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        with torch.no_grad():
            now = _finite(_loss(model, *held, weight), epoch).item()
        if now < best:
            best, kept, epoch_kept = now, copy.deepcopy(model.state_dict()), epoch
        progress(FitProgress(epoch, config.epochs, float(np.mean(losses)), now))
    model.load_state_dict(kept)
    predictor = model.fold() if isinstance(model, Factored) else model
    trained = {
        "settings": asdict(config),
        "data": examples.facts,
        "epoch": epoch_kept,
        "parameters": {
            "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "stored": sum(p.numel() for p in predictor.parameters()),
        },
        "held_back": assess(predictor, examples, test),
    }
    return predictor.eval(), Origin(policy, examples.facts["target"], examples.facts["drafter"], trained)


def assess(predictor: Predictor, examples: Examples, rows: Tensor) -> dict[str, Any]:
    """How good it is on some examples: log loss, beside that of their acceptance rate alone; the chance that it ranks
    an accepted token above a rejected one (AUC); and its calibration error over ten bins.
    """
    from scipy.stats import rankdata

    with torch.no_grad():
        scores = predictor(examples.seen(rows)).double()
    accepted = examples.accepted[rows]
    chances, truth = scores.sigmoid().numpy(), accepted.double().numpy()
    rate, right = truth.mean(), int(truth.sum())
    wrong = len(truth) - right
    base = torch.full_like(scores, float(rate)).logit()
    bins = np.minimum((chances * 10).astype(int), 9)
    gaps = [abs((chances - truth)[bins == b].sum()) for b in range(10)]
    return {
        "tokens": len(rows),
        "acceptance": round(float(rate), 4),
        "loss": round(_loss_of(scores, accepted).item(), 4),
        "loss_of_the_rate": round(_loss_of(base, accepted).item(), 4),
        "auc": round(float(rankdata(scores)[truth == 1].sum() - right * (right + 1) / 2) / (right * wrong), 4),
        "calibration_error": round(float(sum(gaps)) / len(truth), 4),
    }


def _model(policy: str, examples: Examples, config: FitConfig) -> Predictor | Factored:
    form = config.form or FORMS[policy][0]
    if form not in FORMS[policy]:
        raise OptionError(f"{policy} has no predictor of form '{form}'; there is {', '.join(FORMS[policy])}")
    if form == "features":
        return FeaturePredictor()
    if form == "top":
        return TopPredictor()
    if examples.target is None or examples.draft is None:
        raise OptionError(f"the form '{form}' needs hidden states, and {examples.facts['drafter']} shows none")
    if form == "residual":
        return ResidualPredictor(examples.draft.shape[1])
    hidden = HiddenPredictor(examples.target.shape[1], examples.draft.shape[1], config.units)
    return Factored(hidden, config.rank if form == "low-rank" else None)


def _prepare(predictor: Predictor, examples: Examples, rows: Tensor) -> None:
    """Standardise to the hidden states' mean and variance, and begin with what they say nothing about: the rate."""
    seen, rate = examples.seen(rows), examples.accepted[rows].float().mean().logit()
    if isinstance(predictor, HiddenPredictor):
        predictor.scale_target.fit(seen.target)
        predictor.scale_draft.fit(seen.draft)
    elif isinstance(predictor, ResidualPredictor):
        predictor.scale.fit(seen.draft)
    predictor.begin(float(rate))


def _split(examples: Examples, config: FitConfig) -> tuple[Tensor, Tensor]:
    """Rows to train on and rows held back: by prompt, as the tokens of one are alike."""
    prompts = examples.prompt.unique()
    drawn = torch.Generator().manual_seed(config.seed)  # its own: the same for every form
    order = prompts[torch.randperm(len(prompts), generator=drawn)]
    test = torch.isin(examples.prompt, order[: max(1, round(config.held_back * len(order)))])
    for rows, what in ((~test, "to train on"), (test, "held back")):
        found = examples.accepted[rows]
        if not found.any() or found.all():
            raise DataError(
                f"of {len(found)} drafted tokens {what}, {int(found.sum())} were accepted: more prompts are needed"
            )
    return (~test).nonzero()[:, 0], test.nonzero()[:, 0]


def _loss(model: nn.Module, seen: Seen, accepted: Tensor, rejection_weight: float) -> Tensor:
    return _loss_of(model(seen), accepted, torch.where(accepted, 1.0, rejection_weight))


def _loss_of(scores: Tensor, accepted: Tensor, weights: Tensor | None = None) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(scores, accepted.to(scores.dtype), weights)


def _finite(loss: Tensor, epoch: int) -> Tensor:
    if not loss.isfinite():
        raise TrainingError(f"the loss is {loss.item()} in epoch {epoch}: try a lower learning rate")
    return loss
