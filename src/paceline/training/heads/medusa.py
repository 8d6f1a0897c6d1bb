"""`paceline train medusa`: Medusa heads (Cai et al., 2024) of K blocks (KOALA), distilled from the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from paceline.drafters.medusa.head import MedusaHead
from paceline.drafting.parallel import RANKS
from paceline.errors import require
from paceline.training.data.dataset import IGNORE, Batch
from paceline.training.data.samples import UNKNOWN
from paceline.training.heads.head_task import Drafts, FeatureTask, HeadOptions, TargetFeatures, ahead
from paceline.training.heads.initial_weights import fit_medusa
from paceline.training.heads.prepare_feature_heads import frozen_model, prepared
from paceline.training.heads.simulated_acceptance import COUNTS, draft_counts, figures, tally

if TYPE_CHECKING:
    from paceline.training.heads.adversarial import AdversarialOptions
    from paceline.training.heads.frozen_layers import HiddenStates
    from paceline.training.heads.prepare import PreparedTraining, TrainingPlan

DECAY = 0.8  # a head's weight in the loss, relative to the one before it (Medusa, section 2.2.1)


@dataclass(frozen=True, kw_only=True)
class MedusaOptions(HeadOptions):
    """What Medusa heads to train.

    Args:
        heads: how many.
        vocabulary: their vocabulary layers; see `drafters.medusa.head.MedusaConfig`.
    """

    heads: int = 4
    vocabulary: str = "shared"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.heads <= 5, f"heads must lie in 1 .. 5, not {self.heads}")


class MedusaTask(FeatureTask):
    """Head i learns at position t what token t + 2 + i will be: all heads at all positions in one pass."""

    head: MedusaHead

    def __init__(self, head: MedusaHead, features: HiddenStates, objective: str, matrix: Tensor) -> None:
        super().__init__(head, features, objective, matrix)
        self.heads = head.config.heads
        self.counts = COUNTS + self.heads * (RANKS + 1)
        self.accuracies: list[list[float]] = []  # as measured last
        shares = torch.tensor([DECAY**i for i in range(self.heads)])
        self.shares = shares / shares.sum()

    def drafts(self, batch: Batch, learning: bool = True) -> Drafts:
        return self._drafts(batch)[0]

    def _drafts(self, batch: Batch) -> tuple[Drafts, Int[Tensor, "rows heads"], Int[Tensor, "rows heads k"]]:
        """The drafts, ordered by position, then by head; and the text and the target's choices there."""
        labels = self._ahead(batch.labels, IGNORE)
        rows = labels[..., 0] != IGNORE  # at a text's end other heads have nothing to learn: they weigh nothing
        wanted = (labels, self._ahead(batch.top_ids, UNKNOWN), self._ahead(batch.top_logp, -torch.inf))
        labels, top_ids, top_logp = (values[rows] for values in wanted)
        features = self.frozen(batch).to(self.head.weight.dtype)
        seen = features[rows][:, None].expand(-1, self.heads, -1)
        logits = self.head(features[rows]).flatten(0, 1)
        weights = ((labels != IGNORE) * self.shares.to(labels.device)).flatten()
        truth = self._truth(features, rows)
        loss = self.learn(logits, weights, (labels.flatten(), top_ids.flatten(0, 1), top_logp.flatten(0, 1)), truth)
        return Drafts(logits, weights, seen.flatten(0, 1), truth, loss), labels, top_ids

    def _truth(
        self, features: Float[Tensor, "batch tokens hidden"], rows: Bool[Tensor, "batch tokens"]
    ) -> TargetFeatures:
        """Head i at t and head i + 1 at t - 1 draft the same token: what the target says of it is computed once. What
        would lie after a text's end weighs nothing.
        """
        begun = rows.flatten().nonzero()[:, 0]
        ahead_of = begun[:, None] + 1 + torch.arange(self.heads, device=begun.device)
        which, each = ahead_of.clamp(max=rows.numel() - 1).flatten().unique(return_inverse=True)
        return TargetFeatures(features.flatten(0, 1)[which], each)

    def _ahead(self, values: Tensor, fill: float) -> Tensor:
        """`[batch, tokens, ...]` -> `[batch, tokens, heads, ...]`: what is to be known where head i's token follows."""
        return torch.stack([ahead(values, 1 + i, fill) for i in range(self.heads)], 2)

    def count(self, batch: Batch) -> Float[Tensor, " counts"]:
        drafts, labels, top_ids = self._drafts(batch)
        asked = labels != IGNORE
        ranked = min(RANKS, drafts.logits.shape[1])
        best = self.ids(drafts.logits.topk(ranked, -1).indices).view(*labels.shape, ranked)
        right: Bool[Tensor, "rows heads ranks"] = best == labels[..., None]
        parts = [
            tally(draft_counts(right[..., 0], asked), best[:, 0, 0], top_ids[:, 0], drafts.loss),
            nn.functional.pad(right.sum(0), (0, RANKS - ranked)).flatten(),
            asked.sum(0),
        ]
        return torch.cat([part.float() for part in parts])

    def measure(self, counts: Float[Tensor, " counts"]) -> dict[str, float]:
        ranks, asked = counts[COUNTS:].split([self.heads * RANKS, self.heads])
        self.accuracies = (ranks.view(self.heads, RANKS) / asked.clamp(min=1)[:, None]).tolist()
        return figures(counts, self.heads)

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        self.head.config = replace(self.head.config, accuracies=self.accuracies)
        super().save(folder, about)


@torch.no_grad()
def break_symmetry(head: MedusaHead, seed: int) -> None:
    """Make the K blocks of a head differ a little: where all are zero they learn the same for long."""
    first = head.weight[:-1]
    noise = torch.randn(first.shape, generator=torch.Generator().manual_seed(seed))
    first += 1e-3 * noise.to(first.device)


def prepare_medusa(
    name: str,
    folders: Sequence[Path],
    config: MedusaOptions,
    plan: TrainingPlan,
    adversarial: AdversarialOptions | None = None,
) -> PreparedTraining:
    """Medusa heads to train for the model called `name`, on the data of `folders`.

    Raises what `early_exit.prepare_early_exit` does.
    """
    frozen = frozen_model(name, folders, config, MedusaHead)
    head = MedusaHead.from_target(
        frozen.model,
        heads=config.heads,
        layers=config.layers,
        vocabulary=config.vocabulary,
        tokens=frozen.tokens,
    )
    break_symmetry(head, plan.training.seed)

    def make_task(features: HiddenStates, matrix: Tensor) -> MedusaTask:
        return MedusaTask(head, features, config.objective, matrix)

    return prepared(frozen, head, fit_medusa, make_task, config, plan, adversarial)
