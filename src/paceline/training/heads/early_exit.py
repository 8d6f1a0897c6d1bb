"""`paceline train early-exit`: the exit head of EESD, on a target's frozen first layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from paceline.drafters.early_exit.head import MOST_LAYERS
from paceline.errors import require
from paceline.training.data.dataset import IGNORE, Batch
from paceline.training.heads.head_task import HeadTask
from paceline.training.heads.simulated_acceptance import CHAIN, COUNTS, chain_counts, figures, tally
from paceline.training.objectives import WHOLE
from paceline.training.task import TaskOptions

if TYPE_CHECKING:
    from paceline.drafters.early_exit.head import ExitHead

STARTS = ("fitted", "last")


@dataclass(frozen=True, kw_only=True)
class ExitConfig(TaskOptions):
    """What exit head to train, and on what.

    Args:
        layers: N, the target's layers below it.
        exit_layers: of its own.
        rank: of its output matrix; None: full.
        start: "fitted": as the layers that follow the N-th in the target, with an output matrix fitted to the text
            (see `fit_output`); "last": as the target's last layers, norm and output matrix, as in EESD.
    """

    layers: int = 4
    exit_layers: int = 1
    rank: int | None = None
    start: str = "fitted"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.objective != WHOLE, "early-exit does not read the features that objective whole needs")
        fits = 0 <= self.exit_layers <= MOST_LAYERS
        require(fits, f"exit-layers must lie in 0 .. {MOST_LAYERS}, not {self.exit_layers}")
        require(self.start in STARTS, f"start must be {' or '.join(STARTS)}, not '{self.start}'")


class EarlyExitTask(HeadTask):
    """An exit head as a `Task`, on the hidden states of the layers below it."""

    head: ExitHead
    counts = COUNTS

    def loss(self, batch: Batch) -> Float[Tensor, ""]:
        asked = batch.labels != IGNORE
        return self._loss(self._logits(batch, asked), batch, asked)

    def count(self, batch: Batch) -> Float[Tensor, " counts"]:
        asked = batch.labels != IGNORE
        logits = self._logits(batch, asked)
        best = self.ids(logits.argmax(-1))
        right = torch.zeros_like(asked)
        right[asked] = best == batch.labels[asked]
        return tally(chain_counts(right, asked), best, batch.top_ids[asked], self._loss(logits, batch, asked))

    def measure(self, counts: Float[Tensor, " counts"]) -> dict[str, float]:
        return figures(counts, CHAIN)

    def _logits(self, batch: Batch, asked: Bool[Tensor, "batch tokens"]) -> Float[Tensor, "n vocab"]:
        hidden = self.frozen(batch).to(next(self.head.parameters()).dtype)
        return self.head.outputs(self.head.states(hidden)[asked])

    def _loss(self, logits: Float[Tensor, "n vocab"], batch: Batch, asked: Bool[Tensor, "batch tokens"]) -> Tensor:
        wanted = batch.labels[asked], batch.top_ids[asked], batch.top_logp[asked]
        return self.distil(logits, torch.ones_like(logits[:, 0], dtype=torch.float), wanted)
