"""KOALA's adversarial learning (Zhang et al., 2024, algorithm 1): a discriminator learns to tell a head's logits from
the target's, and the head learns to be taken for the target, while it is distilled as ever.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from paceline.errors import require
from paceline.training.task import LARGEST, Player, Task

if TYPE_CHECKING:
    from paceline.training.data.dataset import Batch
    from paceline.training.heads.head_task import Drafts, FeatureTask, TargetFeatures

FORMS = ("full", "low-cost")
COLLAPSED, LONG = 0.05, 50  # a loss of the discriminator (2 log 2 where it knows nothing), steps
NEAR, KNOWS = 0.02, 0.1  # distances of its accuracy from 1/2: at equilibrium; when it has learnt something

log = logging.getLogger("paceline")


@dataclass(frozen=True)
class AdversarialOptions:
    """How to play.

    Args:
        weight: lambda of eq. 5; the paper takes 0.05 to 0.5.
        form: of the discriminator; see `Discriminator`.
        layers: of its stack; the paper takes the head's K.
        lr: its learning rate, relative to the head's.
        patience: measurements in a row at equilibrium that end training; 0: never.
    """

    weight: float
    form: str = "low-cost"
    layers: int = 1
    lr: float = 0.1
    patience: int = 0

    def __post_init__(self) -> None:
        require(0 < self.weight < inf, f"the weight must be > 0 and finite, not {self.weight}")
        require(self.form in FORMS, f"discriminator must be {' or '.join(FORMS)}, not '{self.form}'")
        require(self.layers >= 1, f"discriminator-layers must be >= 1, not {self.layers}")
        require(0 < self.lr <= LARGEST, f"discriminator-lr must be > 0 and at most {LARGEST:g}, not {self.lr}")
        require(self.patience >= 0, f"patience must be >= 0, not {self.patience}")


class Discriminator(nn.Module):
    """Whether logits are the target's, seeing the target's last hidden state: `D = sigmoid` of what `forward` gives.

    A linear layer maps the hidden state, a stack of fully connected layers reads it side by side with the logits. In
    the full form, the paper's, both are as wide as the vocabulary; in the low-cost form both are as wide as the hidden
    state: the logits enter as the expected embedding `softmax(logits) E`.

    Args:
        embeddings: E, a row for every token that can be drafted.
        seed: of its start.
    """

    def __init__(self, form: str, layers: int, embeddings: Float[Tensor, "vocab hidden"], seed: int) -> None:
        super().__init__()
        vocab, hidden = embeddings.shape
        width = vocab if form == "full" else hidden
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.map = nn.Linear(hidden, width)
            sizes = [2 * width, *[hidden] * layers]
            stack = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.SiLU())]
            self.stack = nn.Sequential(*stack, nn.Linear(hidden, 1))
        self.embeddings: Tensor | None
        self.register_buffer("embeddings", None, persistent=False)
        if form == "low-cost":
            self.embeddings = embeddings / embeddings.square().mean().sqrt()

    def given(self, logits: Float[Tensor, "n vocab"]) -> Float[Tensor, "n width"]:
        """What it sees of logits."""
        logits = logits.float()
        if self.embeddings is None:
            # What all logits have in common says nothing of the distribution, and would give a head away.
            return logits - logits.mean(-1, keepdim=True)
        return logits.softmax(-1) @ self.embeddings

    def forward(self, seen: Float[Tensor, "n hidden"], given: Float[Tensor, "n width"]) -> Float[Tensor, " n"]:
        known = self.map(functional.layer_norm(seen, seen.shape[-1:]))
        out: Tensor = self.stack(torch.cat([known, given], -1))
        return out[:, 0]


class Judged(NamedTuple):
    """Of the drafts of a batch, what the discriminator judges them by."""

    hidden: Float[Tensor, "n hidden"]
    drafted: Float[Tensor, "n width"]  # what it sees of the head's logits
    truth: TargetFeatures
    weights: Float[Tensor, " n"]


class Adversarial(Task):
    """A head and its discriminator, who take turns (g = d = 1).

    Args:
        task: the head's own.
        discriminator: D, which reads the logits of the head's tokens.

    Of a head's draft, `drafted` is what D sees of its logits d, and `truth` what the target's logits q come from.
    """

    def __init__(self, task: FeatureTask, discriminator: Discriminator, options: AdversarialOptions) -> None:
        self.task, self.discriminator, self.options = task, discriminator, options
        self.counts = task.counts + 4
        self._judged: dict[tuple[int, ...], Judged] = {}  # by batch: drafts of the head's turn, for the discriminator's
        self._module = nn.ModuleDict({"head": task.module, "discriminator": discriminator})
        # Measurements in a row at equilibrium, once the discriminator has been better than that; before, -1.
        self._level = torch.tensor(-1)
        self._module.register_buffer("level", self._level)
        self._low = torch.tensor(0)  # steps in a row at which its loss was low
        self._module.register_buffer("low", self._low)

    @property
    def head(self) -> Any:
        return self.task.head

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def players(self) -> list[Player]:
        return [
            Player("head", self.task.module, self.loss),
            Player("discriminator", self.discriminator, self.discriminator_loss, self.options.lr),
        ]

    def loss(self, batch: Batch) -> Float[Tensor, ""]:
        """Eq. 5. The gradient reaches the head through its logits: nothing is sampled."""
        drafts = self.task.drafts(batch)
        judged = self._seen(drafts)
        self._judged[_name(batch)] = judged._replace(drafted=judged.drafted.detach())
        verdict = self.discriminator(judged.hidden, judged.drafted)
        return drafts.loss + self.options.weight * (drafts.weights * functional.softplus(-verdict)).sum()

    def discriminator_loss(self, batch: Batch) -> Float[Tensor, ""]:
        """Eq. 6, of what the head drafted in its turn, which comes before."""
        judged = self._judged.pop(_name(batch))
        drafted, real = self._verdicts(judged)
        return (judged.weights * (functional.softplus(drafted) + functional.softplus(-real))).sum()

    def _seen(self, drafts: Drafts) -> Judged:
        return Judged(drafts.hidden, self.discriminator.given(drafts.logits), drafts.truth, drafts.weights)

    def _verdicts(self, judged: Judged) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """On the head's logits and on the target's."""
        real = judged.truth.each(self.discriminator.given(self.task.truth(judged.truth.features)))
        return self.discriminator(judged.hidden, judged.drafted), self.discriminator(judged.hidden, real)

    def count(self, batch: Batch) -> Float[Tensor, " counts"]:
        judged = self._seen(self.task.drafts(batch, learning=False))
        (drafted, real), weights = self._verdicts(judged), judged.weights
        right = weights * ((drafted < 0).float() + (real > 0).float()) / 2
        loss = weights * (functional.softplus(drafted) + functional.softplus(-real))
        fooled = weights * functional.softplus(-drafted)
        own = torch.stack([right.sum(), loss.sum(), fooled.sum(), weights.sum()])
        return torch.cat([self.task.count(batch), own])

    def measure(self, counts: Float[Tensor, " counts"]) -> dict[str, float]:
        right, loss, fooled, weights = counts[self.task.counts :].tolist()
        return self.task.measure(counts[: self.task.counts]) | {
            "discriminator_accuracy": right / weights,
            "discriminator_held_back_loss": loss / weights,
            "adversarial_held_back_loss": fooled / weights,
        }

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        self.task.save(folder, about)

    def watch(self, losses: dict[str, float]) -> None:
        """Warn once of a discriminator that has long been right about everything: nothing is to be learnt from it."""
        self._low.copy_(self._low + 1 if losses["discriminator"] < COLLAPSED else torch.zeros_like(self._low))
        if int(self._low) == LONG:
            log.warning(
                "The discriminator has collapsed: its loss was below %g for %d steps, so the head learns nothing more "
                "from it. Take a lower --discriminator-lr, fewer --discriminator-layers or a higher --adversarial.",
                *(COLLAPSED, LONG),
            )

    def ends(self, measured: dict[str, float]) -> bool:
        """At equilibrium, where the discriminator's accuracy has come back to about 1/2."""
        level = self._level
        if measured:
            distance = abs(measured["discriminator_accuracy"] - 0.5)
            if distance > KNOWS:
                level.fill_(0)
            elif int(level) >= 0:
                level.copy_(level + 1 if distance <= NEAR else torch.zeros_like(level))
        return bool(self.options.patience) and int(level) >= self.options.patience


def _name(batch: Batch) -> tuple[int, ...]:
    return tuple(row.start for row in batch.rows)
