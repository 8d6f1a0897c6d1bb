"""`paceline train eagle`, `eagle3`: heads of EAGLE and EAGLE-3 (Li et al., 2024, 2025), distilled from the target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from paceline.drafters.eagle.eagle3_head import BESIDE, Eagle3Head
from paceline.drafters.eagle.head import EagleHead
from paceline.errors import require
from paceline.training.data.dataset import IGNORE, Batch
from paceline.training.data.samples import UNKNOWN
from paceline.training.heads.head_task import Drafts, FeatureTask, HeadOptions, TargetFeatures, ahead
from paceline.training.heads.initial_weights import fit_eagle, fit_eagle3
from paceline.training.heads.prepare_feature_heads import frozen_model, prepared
from paceline.training.heads.rollout import rollout
from paceline.training.heads.simulated_acceptance import CHAIN, COUNTS, draft_counts, figures, tally
from paceline.training.objectives import WHOLE

if TYPE_CHECKING:
    from paceline.training.heads.adversarial import AdversarialOptions
    from paceline.training.heads.frozen_layers import HiddenStates
    from paceline.training.heads.prepare import PreparedTraining, TrainingPlan


@dataclass(frozen=True, kw_only=True)
class EagleOptions(HeadOptions):
    """How to train an EAGLE head.

    Args:
        regression: weight of the smooth L1 distance to the target's feature, relative to the distillation (EAGLE: 10).
        noise: to add to the features that the head reads, uniform in +- this share of their root mean square (EAGLE:
            0.1, of features whose scale is about 1).
        rollout: drafting steps that are learnt: 1, on what the head reads of the target only, as in EAGLE-1; above,
            also on its own states (training-time test, as in EAGLE-3).
        fading: weight of a step relative to the one before it.
    """

    regression: float = 1.0
    noise: float = 0.1
    rollout: int = 3
    fading: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("regression", "noise"):
            value = getattr(self, name)
            require(0 <= value < inf, f"{name} must be >= 0 and finite, not {value}")
        require(1 <= self.rollout <= CHAIN, f"rollout must lie in 1 .. {CHAIN}, not {self.rollout}")
        require(0 < self.fading <= 1, f"fading must lie in (0, 1], not {self.fading}")


@dataclass(frozen=True, kw_only=True)
class Eagle3Options(EagleOptions):
    """How to train an EAGLE-3 head: its states are no guesses of the target's, so there is no regression.

    Args:
        taps: see `Eagle3Config`; none: those of EAGLE-3's authors.
        token, shallow: see `Eagle3Config`.
    """

    regression: float = 0.0
    noise: float = 0.0
    taps: tuple[int, ...] = ()
    token: str = BESIDE
    shallow: int = 0


class _Step(NamedTuple):
    """One step of the drafts of a batch, at the positions where the next token is one to learn."""

    rows: Bool[Tensor, "batch tokens"]
    guessed: Float[Tensor, "n hidden"]
    logits: Float[Tensor, "n vocab"]


class EagleTask(FeatureTask):
    """What belongs to position t of a text, where `batch.labels` and `top_ids` have token t + 1.

    the head reads          the target's states at t, token t + 1   what is frozen, ids ahead by 1
    EAGLE-1 guesses         the feature at t + 1                    features ahead by 1
    its logits are of       token t + 2                             labels, top_ids ahead by 1
    in step n (from 0)      for a draft that began from t - n; `count` moves that back to where it began
    """

    head: EagleHead | Eagle3Head
    counts = COUNTS

    def __init__(
        self, head: EagleHead | Eagle3Head, features: HiddenStates, options: EagleOptions, matrix: Tensor, seed: int
    ) -> None:
        super().__init__(head, features, options.objective, matrix)
        self.options, self.seed = options, seed

    def drafts(self, batch: Batch, learning: bool = True) -> Drafts:
        read, features = self._frozen(batch)
        every = learning and self.options.objective == WHOLE
        read = read + self._noise(batch, read) if learning and self.options.noise else read
        steps = list(self._steps(batch, read, self.options.rollout, every))
        weights = self._weights(batch, steps)
        # Steps draft the same tokens from different places: what the target says of each is computed once.
        asked = steps[0].rows
        number = (asked.flatten().cumsum(0) - 1).view_as(asked)
        truth = TargetFeatures(ahead(features, 1, 0.0)[asked], torch.cat([number[step.rows] for step in steps]))
        logits = torch.cat([step.logits for step in steps])
        loss = self._said(batch, steps, logits, weights, truth)
        if self.options.regression:
            guessed = torch.cat([step.guessed for step in steps])
            far = functional.smooth_l1_loss(guessed, truth.each(truth.features), reduction="none").mean(-1)
            loss = loss + self.options.regression * (weights * far).sum()
        began = torch.cat([ahead(features, -n, 0.0)[step.rows] for n, step in enumerate(steps)])
        return Drafts(logits, weights, began, truth, loss)

    def _weights(self, batch: Batch, steps: Sequence[_Step]) -> Float[Tensor, " n"]:
        """Of every draft, by its step. They sum to the labels of the batch, at however many positions is learnt."""
        labels = int((ahead(batch.labels, 1, IGNORE) != IGNORE).sum())
        shares = [self.options.fading**n for n in range(len(steps))]
        each = labels / max(1, len(steps[0].logits)) / sum(shares)
        return torch.cat(
            [
                torch.full_like(step.logits[:, 0], each * share, dtype=torch.float32)
                for step, share in zip(steps, shares, strict=True)
            ]
        )

    def _frozen(self, batch: Batch) -> tuple[Float[Tensor, "batch tokens read"], Float[Tensor, "batch tokens hidden"]]:
        """What the head reads of the target, and the target's features."""
        frozen, size = self.frozen(batch).to(self.head.fc.weight.dtype), self.head.lm.config.hidden_size
        return frozen[..., : max(size, frozen.shape[-1] - size)], frozen[..., -size:]

    def _steps(self, batch: Batch, read: Tensor, count: int, every: bool = False) -> Iterator[_Step]:
        """Of every position of the texts, prompts too, or of those where there is something to learn."""
        asked = ahead(batch.labels, 1, IGNORE) != IGNORE
        if every:
            ends = torch.tensor([[len(row) - 1] for row in batch.rows], device=asked.device)
            asked = torch.arange(asked.shape[1], device=asked.device) < ends
        for n, guessed in enumerate(rollout(self.head, read, batch.ids, count)):
            rows = asked.clone()
            rows[:, :n] = False  # where a draft would have begun before the text
            yield _Step(rows, guessed[rows], self.head.outputs(guessed[rows]))

    def _said(
        self, batch: Batch, steps: Sequence[_Step], logits: Tensor, weights: Tensor, truth: TargetFeatures
    ) -> Float[Tensor, ""]:
        """The loss of what steps say of the next token."""
        labels, top_ids = ahead(batch.labels, 1, IGNORE), ahead(batch.top_ids, 1, UNKNOWN)
        known = labels, top_ids, ahead(batch.top_logp, 1, -torch.inf)
        at_labels, at_ids, at_logp = (torch.cat([values[step.rows] for step in steps]) for values in known)
        return self.learn(logits, weights, (at_labels, at_ids, at_logp), truth)

    def _noise(self, batch: Batch, features: Tensor) -> Tensor:
        """Drawn by the step and what is in the batch: the same for any number of processes, and after a resumption."""
        drawn = np.random.default_rng([self.seed, batch.step, *(row.start for row in batch.rows)])
        uniform = torch.from_numpy(drawn.random(features.shape, np.float32)).to(features)
        there = torch.arange(features.shape[1]) < torch.tensor([[len(row)] for row in batch.rows])
        size = features[there.to(features.device)].square().mean().sqrt()
        return self.options.noise * size * (2 * uniform - 1)

    def count(self, batch: Batch) -> Float[Tensor, " counts"]:
        read, features = self._frozen(batch)
        labels, top_ids = ahead(batch.labels, 1, IGNORE), ahead(batch.top_ids, 1, UNKNOWN)
        right, asked = [], []
        for n, step in enumerate(self._steps(batch, read, CHAIN)):
            best = self.ids(step.logits.argmax(-1))
            hits = torch.zeros_like(step.rows)
            hits[step.rows] = best == labels[step.rows]
            right.append(ahead(hits, n, False))
            asked.append(ahead(step.rows, n, False))
            if n == 0:
                first, chosen = step, best
        truth = TargetFeatures(ahead(features, 1, 0.0)[first.rows])
        loss = self._said(batch, [first], first.logits, torch.ones_like(first.logits[:, 0]), truth)
        return tally(draft_counts(torch.stack(right, -1), torch.stack(asked, -1)), chosen, top_ids[first.rows], loss)

    def measure(self, counts: Float[Tensor, " counts"]) -> dict[str, float]:
        return figures(counts, CHAIN)


def prepare_eagle(
    name: str,
    folders: Sequence[Path],
    config: EagleOptions,
    plan: TrainingPlan,
    adversarial: AdversarialOptions | None = None,
) -> PreparedTraining:
    """An EAGLE head, as `medusa.prepare_medusa`."""
    frozen = frozen_model(name, folders, config, EagleHead)
    head = EagleHead.from_target(frozen.model, config.layers, tokens=frozen.tokens, seed=plan.training.seed)

    def make_task(features: HiddenStates, matrix: Tensor) -> EagleTask:
        return EagleTask(head, features, config, matrix, plan.training.seed)

    return prepared(frozen, head, fit_eagle, make_task, config, plan, adversarial)


def prepare_eagle3(
    name: str,
    folders: Sequence[Path],
    config: Eagle3Options,
    plan: TrainingPlan,
    adversarial: AdversarialOptions | None = None,
) -> PreparedTraining:
    """An EAGLE-3 head, as `medusa.prepare_medusa`."""
    frozen = frozen_model(name, folders, config, Eagle3Head)
    head = Eagle3Head.from_target(
        frozen.model,
        config.layers,
        tokens=frozen.tokens,
        taps=config.taps,
        token=config.token,
        shallow=config.shallow,
        seed=plan.training.seed,
    )
    if isinstance(frozen.init, Eagle3Head):
        alike = head.config.norm_first == frozen.init.config.norm_first
        require(alike, "the head to go on from is of a form that is not trained here: norm_before_residual")

    def make_task(states: HiddenStates, matrix: Tensor) -> EagleTask:
        return EagleTask(head, states, config, matrix, plan.training.seed)

    return prepared(frozen, head, fit_eagle3, make_task, config, plan, adversarial, taps=head.reads)
