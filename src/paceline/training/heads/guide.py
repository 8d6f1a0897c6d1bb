"""`paceline train guide`: which of the n-grams' candidates comes next, learned from the target's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from paceline.drafters.trigram.drafter import find_matrix
from paceline.drafters.trigram.guide import Guide
from paceline.drafters.trigram.guided import follow_up
from paceline.drafters.trigram.matrix import no_matrix, token_bits
from paceline.drafters.trigram.structures import Rule
from paceline.drafting.heads import placed, with_blocks
from paceline.errors import require
from paceline.targets.reference import as_target
from paceline.targets.sources import load_as_stored
from paceline.training.data.dataset import IGNORE, Batch, Dataset
from paceline.training.data.samples import UNKNOWN
from paceline.training.heads.feature_store import FeatureStore
from paceline.training.heads.frozen_layers import FrozenLayers, HiddenStates
from paceline.training.heads.head_task import HeadTask, ahead
from paceline.training.heads.initial_weights import Regression
from paceline.training.heads.prepare import (
    PreparedTraining,
    TrainingPlan,
    facts,
    fast,
    go_on,
    parameters,
    training_data,
    warn_of_strangers,
)
from paceline.training.heads.simulated_acceptance import COUNTS, draft_counts, figures, tally
from paceline.training.objectives import TEXT, WHOLE, soft_cross_entropy, soft_labels
from paceline.training.task import TaskOptions

if TYPE_CHECKING:
    from paceline.drafters.trigram.matrix import Matrix


@dataclass(frozen=True, kw_only=True)
class GuideOptions(TaskOptions):
    """What guide to train, and on what.

    Args:
        rank, inner: see `drafters.trigram.guide.GuideConfig`.
        matrix: of n-grams, as for `trigram`. It should be made of other text than the guide learns from, which it
            would else know too well.
        init: folder of a trained guide to go on from; "": a new one, which is fitted to the text.
    """

    without_probabilities = (TEXT,)

    rank: int = 256
    inner: int = 256
    matrix: str = "auto"
    init: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.objective != WHOLE, "a guide chooses among candidates: objective whole is for heads without them")


class Places(NamedTuple):
    """Where a guide is asked, and what it is told there: see `Guide.forward`."""

    asked: Bool[Tensor, "batch tokens"]  # whether the next token is to be told
    states: Float[Tensor, "n hidden"]
    ids: Int[Tensor, " n"]
    candidates: Int[Tensor, "n k"]
    probs: Float[Tensor, "n k"]
    own: Float[Tensor, "n k"]


class GuideTask(HeadTask):
    """A guide as a `Task`.

    Args:
        matrix: of n-grams.
    """

    head: Guide
    counts = COUNTS + 1

    def __init__(self, head: Guide, frozen: HiddenStates, objective: str, matrix: Matrix) -> None:
        super().__init__(head, frozen, objective)
        self.matrix = matrix
        self.rule = Rule(matrix.order, token_bits(matrix.vocab), False, 0.0, 1.0, 1.0)

    def places(self, batch: Batch) -> Places:
        """Candidates are what n-grams of the matrix and of the text up to there propose."""
        asked = batch.labels != IGNORE
        asked[:, 0] = False  # nothing is known of the state that told the first token
        told = [self._told(batch.ids[row, : len(lie)], asked[row]) for row, lie in enumerate(batch.rows)]
        candidates, probs, own = (torch.cat(parts).to(batch.ids.device) for parts in zip(*told, strict=True))
        states = ahead(self.frozen(batch), -1, 0.0)[asked].float()
        return Places(asked, states, batch.ids[asked], candidates.long(), probs, own)

    def _told(self, ids: Int[Tensor, " tokens"], asked: Bool[Tensor, " tokens"]) -> list[Tensor]:
        """What n-grams say of a text's places that are asked for."""
        at = asked.nonzero()[:, 0].cpu()
        first = int(at[0]) if len(at) else len(ids)
        return [torch.from_numpy(part)[at - first] for part in follow_up(self.matrix, self.rule, ids.tolist(), first)]

    def loss(self, batch: Batch) -> Float[Tensor, ""]:
        places = self.places(batch)
        return self._loss(self.head(*places[1:]), places, batch)

    def count(self, batch: Batch) -> Float[Tensor, " counts"]:
        places = self.places(batch)
        logits = self.head(*places[1:])
        best = _chosen(places.candidates, logits[:, :-1])
        right = (best == batch.labels[places.asked])[:, None]
        loss = self._loss(logits, places, batch)
        counts = tally(draft_counts(right, torch.ones_like(right)), best, batch.top_ids[places.asked], loss)
        alone = _chosen(places.candidates, places.probs) == batch.labels[places.asked]
        return torch.cat([counts, alone.sum()[None].float()])

    def measure(self, counts: Float[Tensor, " counts"]) -> dict[str, float]:
        """`ngrams`: what n-grams alone would have right."""
        labels = counts[COUNTS - 1].clamp(min=1)
        return {**figures(counts[:COUNTS], 1), "ngrams": float(counts[-1] / labels)}

    def _loss(self, logits: Float[Tensor, "n k+1"], places: Places, batch: Batch) -> Float[Tensor, ""]:
        """Cross-entropy against what comes next, which may be none of the candidates."""
        asked, none = places.asked, places.candidates.shape[1]
        tokens, shares = soft_labels(self.objective, batch.labels[asked], batch.top_ids[asked], batch.top_logp[asked])
        same = (places.candidates[:, None, :] == tokens[:, :, None]) & (tokens != UNKNOWN)[:, :, None]
        return soft_cross_entropy(logits, torch.where(same.any(-1), same.int().argmax(-1), none), shares)


def _chosen(candidates: Int[Tensor, "n k"], scores: Float[Tensor, "n k"]) -> Int[Tensor, " n"]:
    return candidates.gather(1, scores.argmax(1, keepdim=True))[:, 0]


def prepare_guide(name: str, folders: Sequence[Path], config: GuideOptions, plan: TrainingPlan) -> PreparedTraining:
    """A guide to train for the model called `name`, on the data of `folders`.

    Raises what `early_exit.prepare_early_exit` does; NativeUnavailable where n-grams' candidates cannot be told.
    """
    model, tokenizer = load_as_stored(name)
    data = training_data(folders, config, tokenizer)
    samples = data.split(plan.training.held_back)[0]
    total, dtype = parameters(model), plan.dtype(model.dtype)
    target = with_blocks(as_target(model.float(), tokenizer), Guide.kind)
    head = Guide.from_target(model, rank=config.rank, inner=config.inner, seed=plan.training.seed)
    if config.init:  # before what takes long: it may not fit
        go_on(head, Guide.load(config.init, target))
    home = head.stored_path(target)
    plan.at_home(home)
    warn_of_strangers(data, head.config.target)
    matrix = find_matrix(target, config.matrix) or no_matrix(3, target.vocab_size)
    head.to(plan.device)
    layers = FrozenLayers(fast(placed(model, plan.device, dtype), tokenizer, plan.tier), target.num_layers)
    frozen: HiddenStates = layers
    if config.stored:
        frozen = FeatureStore(layers, data, head.fingerprint, config.store_limit, plan.stored)
    task = GuideTask(head, frozen, config.objective, matrix)
    if not config.init:
        _fit(task, lambda states: layers.target.features(states.to(dtype)).float(), data, samples)
    settings = {"model": head.config.target, "data": data.digest, **facts(config)}
    loaded = total + head.parameter_counts()["total"]
    return PreparedTraining(task, data, home, settings, loaded, total)


@torch.no_grad()
def _fit(task: GuideTask, features: Callable[[Tensor], Tensor], data: Dataset, samples: Sequence[int]) -> None:
    """Let it begin with the linear guess of what the next feature is, from the state before and the token."""
    head, seen = task.head, list[Tensor]()
    device, size = head.enter.weight.device, head.config.hidden
    found = Regression(2 * size, size, device)
    for batch in map(data.batch, data.batches(samples, 2048, seed=(0,))):
        batch = batch.to(device)
        states, asked = task.frozen(batch), batch.labels != IGNORE
        asked[:, 0] = False
        seen.append(head.read(ahead(states, -1, 0.0)[asked].float(), batch.ids[asked]))
        if found.add(seen[-1], features(states[asked])):
            break
    head.start_from(found.solve(), torch.cat(seen))
