"""`paceline train early-exit`: the exit head of EESD, on a target's frozen first layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from paceline.drafters.early_exit.head import ExitHead
from paceline.registry import require
from paceline.training.acceptance import CHAIN, COUNTS, chain_counts, figures, tally
from paceline.training.dataset import IGNORE, Batch
from paceline.training.frozen import Frozen
from paceline.training.objectives import soft_cross_entropy, soft_labels
from paceline.training.task import Task, TaskOptions

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
        require(self.start in STARTS, f"start must be {' or '.join(STARTS)}, not '{self.start}'")


class EarlyExit(Task):
    """An exit head as a `Task`.

    Args:
        head: in float32; what it computes in is the trainer's affair.
        frozen: the layers below it.
        objective: see `soft_labels`.
    """

    counts = COUNTS

    def __init__(self, head: ExitHead, frozen: Frozen, objective: str = "text") -> None:
        self.head, self.frozen, self.objective = head, frozen, objective

    @property
    def module(self) -> ExitHead:
        return self.head

    def loss(self, batch: Batch) -> Float[Tensor, ""]:
        asked = batch.labels != IGNORE
        return self._loss(self._logits(batch, asked), batch, asked)

    def count(self, batch: Batch) -> Float[Tensor, " counts"]:
        asked = batch.labels != IGNORE
        logits = self._logits(batch, asked)
        drafted = logits.argmax(-1)
        best = drafted if self.head.tokens is None else self.head.tokens[drafted]
        right = torch.zeros_like(asked)
        right[asked] = best == batch.labels[asked]
        return tally(chain_counts(right, asked), best, batch.top_ids[asked], self._loss(logits, batch, asked))

    def measure(self, counts: Float[Tensor, " counts"]) -> dict[str, float]:
        return figures(counts, CHAIN)

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        self.head.config = replace(self.head.config, trained=about)
        self.head.save(folder)

    def _logits(self, batch: Batch, asked: Bool[Tensor, "batch tokens"]) -> Float[Tensor, "n vocab"]:
        hidden = self.frozen(batch).to(next(self.head.parameters()).dtype)
        return self.head.outputs(self.head.states(hidden)[asked])

    def _loss(self, logits: Float[Tensor, "n vocab"], batch: Batch, asked: Bool[Tensor, "batch tokens"]) -> Tensor:
        tokens, weights = soft_labels(self.objective, batch.labels[asked], batch.top_ids[asked], batch.top_logp[asked])
        return soft_cross_entropy(logits, self.head.labels(tokens), weights)
