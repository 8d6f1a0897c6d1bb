"""`paceline train dflash`: the head of DFlash (Chen, Liang and Liu, 2026), distilled from the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from paceline.drafters.dflash.head import DFlashHead
from paceline.errors import require
from paceline.training.data.dataset import IGNORE, Batch
from paceline.training.heads.head_task import Drafts, FeatureTask, HeadOptions, TargetFeatures
from paceline.training.heads.initial_weights import fit_dflash
from paceline.training.heads.prepare_feature_heads import frozen_model, prepared
from paceline.training.heads.simulated_acceptance import CHAIN, COUNTS, draft_counts, figures, tally
from paceline.training.objectives import WHOLE

if TYPE_CHECKING:
    from paceline.training.heads.adversarial import AdversarialOptions
    from paceline.training.heads.frozen_layers import HiddenStates
    from paceline.training.heads.prepare import PreparedTraining, TrainingPlan


@dataclass(frozen=True, kw_only=True)
class DFlashOptions(HeadOptions):
    """How to train a DFlash head.

    Args:
        block: tokens of a block; see `DFlashConfig`.
        taps: see `DFlashConfig`; none: five that are evenly spread.
        mask: see `DFlashConfig`; None: the target's last token.
        inner: width of the layers' MLPs; None: as the target's.
        every: tokens for each block that is learnt: blocks begin at a share of the text's tokens, drawn anew each step.
        fading: weight of a place, relative to the one before it (DFlash: exp(-1/4) in blocks of 8).
    """

    block: int = 8
    taps: tuple[int, ...] = ()
    mask: int | None = None
    inner: int | None = None
    every: int = 4
    fading: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.every >= 1, f"every must be >= 1, not {self.every}")
        require(0 < self.fading <= 1, f"fading must lie in (0, 1], not {self.fading}")


class BlockStarts(NamedTuple):
    """At which tokens of each text the blocks begin."""

    begins: Int[Tensor, "batch blocks"]
    there: Bool[Tensor, "batch blocks"]  # False: padding


class DFlashTask(FeatureTask):
    """A block that begins at token t reads the target's states before t; its place j (from 0) tells token t + 1 + j,
    which is the label of position t + j, and what the target's feature there tells.
    """

    head: DFlashHead
    counts = COUNTS

    def __init__(
        self, head: DFlashHead, features: HiddenStates, options: DFlashOptions, matrix: Tensor, seed: int
    ) -> None:
        super().__init__(head, features, options.objective, matrix)
        self.options, self.seed, self.places = options, seed, head.config.places

    def drafts(self, batch: Batch, learning: bool = True) -> Drafts:
        every = learning and self.options.objective == WHOLE
        return self._drafts(batch, self._drawn(batch, self._beginnings(batch, every)), every)[0]

    def count(self, batch: Batch) -> Float[Tensor, " counts"]:
        drafts, at, asked = self._drafts(batch, self._regular(self._beginnings(batch, False)), False)
        best = torch.full_like(at, IGNORE)
        best[asked] = self.ids(drafts.logits.argmax(-1))
        right = best == batch.labels.flatten()[at]
        first, rows = asked.nonzero()[:, 1] == 0, drafts.truth.rows
        assert rows is not None  # several blocks tell the same token
        wanted = self._wanted(batch, at[asked][first])
        ones = torch.ones_like(drafts.weights[first])
        loss = self.learn(drafts.logits[first], ones, wanted, drafts.truth._replace(rows=rows[first]))
        return tally(draft_counts(right[:, :CHAIN], asked[:, :CHAIN]), best[asked][first], wanted[1], loss)

    def measure(self, counts: Float[Tensor, " counts"]) -> dict[str, float]:
        return figures(counts, min(CHAIN, self.places))

    def _beginnings(self, batch: Batch, every: bool) -> Bool[Tensor, "batch tokens"]:
        """Where a block may begin: not at a text's first token, before which there is nothing to read."""
        may = self._to_learn(batch, every)
        may[:, 0] = False
        return may

    def _to_learn(self, batch: Batch, every: bool) -> Bool[Tensor, "batch tokens"]:
        """Where the next token is one to learn; `every`: where there is one."""
        if not every:
            return batch.labels != IGNORE
        ends = torch.tensor([[len(row) - 1] for row in batch.rows], device=batch.ids.device)
        return torch.arange(batch.ids.shape[1], device=batch.ids.device) < ends

    def _wanted(self, batch: Batch, at: Int[Tensor, " n"]) -> tuple[Tensor, Tensor, Tensor]:
        """What is to be known at these positions of the flattened batch; see `distil`."""
        labels, top_ids, top_logp = (v.flatten(0, 1)[at] for v in (batch.labels, batch.top_ids, batch.top_logp))
        return labels, top_ids, top_logp

    def _drawn(self, batch: Batch, may: Bool[Tensor, "batch tokens"]) -> BlockStarts:
        """Drawn by the step and the text: the same for any number of processes, and after a resumption."""
        chosen = []
        for row, allowed in zip(batch.rows, may.cpu().numpy(), strict=True):
            at = np.flatnonzero(allowed)
            draw = np.random.default_rng([self.seed, batch.step, row.start])
            chosen.append(np.sort(draw.choice(at, -(-len(at) // self.options.every), replace=False)))
        return _side_by_side(chosen, may.device)

    def _regular(self, may: Bool[Tensor, "batch tokens"]) -> BlockStarts:
        """For measuring: always the same."""
        return _side_by_side([np.flatnonzero(row)[:: self.options.every] for row in may.cpu().numpy()], may.device)

    def _drafts(
        self, batch: Batch, blocks: BlockStarts, every: bool
    ) -> tuple[Drafts, Int[Tensor, "n places"], Bool[Tensor, "n places"]]:
        """The drafts, by block, then by place; of each block and place, which position of the flattened batch has what
        is to be known there, and whether there is anything.
        """
        frozen, size = self.frozen(batch).to(self.head.fc.weight.dtype), self.head.fc.out_features
        read, features = frozen[..., :-size], frozen[..., -size:]
        states = self._states(batch, blocks, read)[blocks.there]
        text, began = blocks.there.nonzero()[:, 0], blocks.begins[blocks.there]
        ahead = began[:, None] + torch.arange(self.places, device=began.device)
        length = batch.ids.shape[1]
        at = text[:, None] * length + ahead.clamp(max=length - 1)
        asked = (ahead < length) & self._to_learn(batch, every).flatten()[at]
        logits = self.head.outputs(states[asked])
        which, rows = at[asked].unique(return_inverse=True)
        truth = TargetFeatures(features.flatten(0, 1)[which], rows)
        weights = self._weights(batch, asked)
        loss = self.learn(logits, weights, self._wanted(batch, at[asked]), truth)
        before = features.flatten(0, 1)[text * length + began - 1]
        hidden = before[:, None].expand(*asked.shape, -1)[asked]
        return Drafts(logits, weights, hidden, truth, loss), at, asked

    def _states(
        self, batch: Batch, blocks: BlockStarts, read: Float[Tensor, "batch tokens taps*hidden"]
    ) -> Float[Tensor, "batch blocks places hidden"]:
        """What comes out at the places of all blocks, in one pass: a block sees the text before it, and itself."""
        (texts, count), block, length = blocks.begins.shape, self.head.config.block, read.shape[1]
        ids = torch.full((texts, count, block), self.head.config.mask, device=read.device)
        ids[..., 0] = batch.ids.gather(1, blocks.begins)
        own = blocks.begins[..., None] + torch.arange(block, device=read.device)
        before = torch.arange(length, device=read.device)
        positions = torch.cat([before.expand(texts, -1), own.flatten(1)], 1)
        known = before < blocks.begins.repeat_interleave(block, 1)[..., None]
        number = torch.arange(count, device=read.device).repeat_interleave(block)
        together = (number[:, None] == number).expand(texts, -1, -1)
        seen = torch.cat([known, together], -1)[:, None]
        made: Tensor = self.head(self.head.known(read), ids.flatten(1), positions, seen)
        return made.view(texts, count, block, -1)[:, :, 0 if self.head.config.from_known else 1 :]

    def _weights(self, batch: Batch, asked: Bool[Tensor, "n places"]) -> Float[Tensor, " m"]:
        """By place. They sum to the labels of the batch, or a little less, at however many places is learnt."""
        shares = self.options.fading ** torch.arange(self.places, device=asked.device, dtype=torch.float32)
        each = int((batch.labels != IGNORE).sum()) / max(1, len(asked)) / float(shares.sum())
        return (each * shares).expand(asked.shape)[asked]


def _side_by_side(rows: list[np.ndarray], device: torch.device) -> BlockStarts:
    most = max(1, *(len(row) for row in rows))
    begins, there = np.ones((len(rows), most), dtype=np.int64), np.zeros((len(rows), most), dtype=bool)
    for index, row in enumerate(rows):
        begins[index, : len(row)], there[index, : len(row)] = row, True
    return BlockStarts(torch.from_numpy(begins).to(device), torch.from_numpy(there).to(device))


def prepare_dflash(
    name: str,
    folders: Sequence[Path],
    config: DFlashOptions,
    plan: TrainingPlan,
    adversarial: AdversarialOptions | None = None,
) -> PreparedTraining:
    """A DFlash head, as `medusa.prepare_medusa`."""
    frozen = frozen_model(name, folders, config, DFlashHead)
    head = DFlashHead.from_target(
        frozen.model,
        config.layers,
        block=config.block,
        tokens=frozen.tokens,
        taps=config.taps,
        mask=config.mask,
        inner=config.inner,
        seed=plan.training.seed,
    )

    if isinstance(frozen.init, DFlashHead):
        ours, theirs = head.config, frozen.init.config
        same = all(getattr(ours, name) == getattr(theirs, name) for name in ("taps", "mask", "shape"))
        require(same, "the head to go on from has other --taps, another --mask or layers of another shape")
        plain = not any((*theirs.causal, *theirs.windows, theirs.from_known, theirs.bias))
        require(plain, "the head to go on from is of a form that is not trained here: causal, windows, anchor or bias")

    def make_task(states: HiddenStates, matrix: Tensor) -> DFlashTask:
        return DFlashTask(head, states, config, matrix, plan.training.seed)

    return prepared(frozen, head, fit_dflash, make_task, config, plan, adversarial, taps=head.config.taps)
