"""`paceline train early-exit`: the exit head of EESD, on a target's frozen first layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from paceline.drafters.early_exit.head import MOST_LAYERS, ExitHead
from paceline.drafting.heads import placed
from paceline.errors import require
from paceline.targets.families import output_matrix
from paceline.targets.reference import as_target
from paceline.targets.sources import load_as_stored
from paceline.training.data.dataset import IGNORE, Batch, frequent_tokens
from paceline.training.heads.feature_store import FeatureStore
from paceline.training.heads.frozen_layers import FrozenLayers, HiddenStates, cut
from paceline.training.heads.head_task import HeadTask
from paceline.training.heads.initial_weights import fit_output
from paceline.training.heads.prepare import (
    PreparedTraining,
    TrainingPlan,
    facts,
    fast,
    parameters,
    training_data,
    warn_of_strangers,
)
from paceline.training.heads.simulated_acceptance import CHAIN, COUNTS, chain_counts, figures, tally
from paceline.training.objectives import TEXT, WHOLE
from paceline.training.task import TaskOptions

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

    without_probabilities = (TEXT,)

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


def prepare_early_exit(name: str, folders: Sequence[Path], config: ExitConfig, plan: TrainingPlan) -> PreparedTraining:
    """An exit head to train for the model called `name`, on the data of `folders`.

    Raises:
        ModelError, UnsupportedModel: the model cannot be found, or its layers do not run one by one.
        DataError: the data is missing, damaged, or another tokenizer's.
        OptionError: a number out of the model's range.
    """
    model, tokenizer = load_as_stored(name)
    data = training_data(folders, config, tokenizer)
    samples = data.split(plan.training.held_back)[0]
    total, count = parameters(model), model.config.num_hidden_layers
    require(1 <= config.layers < count, f"layers must lie in 1 .. {count - 1}, not {config.layers}")
    follow = config.start == "fitted" and config.layers + config.exit_layers <= count
    model = cut(model, config.layers + (config.exit_layers if follow else 0), max(1, config.exit_layers))
    dtype = plan.dtype(model.dtype)
    model = model.float()  # for a fingerprint that does not depend on how training computes
    target = as_target(model)
    head = ExitHead.from_target(
        model,
        config.layers,
        exit_layers=config.exit_layers,
        tokens=frequent_tokens(data.frequencies(target.vocab_size), config.vocab, target.eos),
        rank=config.rank,
        copied=config.layers if follow else None,
    )
    home = head.stored_path(target)
    plan.at_home(home)
    warn_of_strangers(data, head.config.target)
    head.to(plan.device)
    matrix = output_matrix(model).to(plan.device, copy=True)
    model = placed(cut(model, config.layers), plan.device, dtype)
    loaded = parameters(model) + head.parameter_counts()["total"]
    frozen: HiddenStates
    frozen = first = FrozenLayers(fast(model, tokenizer, plan.tier), config.layers)
    if config.stored:
        frozen = FeatureStore(first, data, head.fingerprint, config.store_limit, plan.stored)
    if config.start == "fitted":
        fit_output(head, matrix, frozen, data, samples)
    settings = {"model": head.config.target, "data": data.digest, **facts(config)}
    return PreparedTraining(EarlyExitTask(head, frozen, config.objective), data, home, settings, loaded, total)
