"""What trained heads have in common as tasks; and those on the target's features (Medusa, EAGLE)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from paceline.errors import require
from paceline.targets.families import AS_IT_IS
from paceline.training.objectives import WHOLE, soft_cross_entropy, soft_labels, whole_cross_entropy
from paceline.training.task import Task, TaskOptions

if TYPE_CHECKING:
    from paceline.drafting.heads import TrainedHead
    from paceline.training.data.dataset import Batch
    from paceline.training.heads.frozen_layers import HiddenStates


@dataclass(frozen=True, kw_only=True)
class HeadOptions(TaskOptions):
    """What head to train, and on what.

    Args:
        layers: K.
        init: folder of a trained head to go on from, which says what can be drafted, too; "": a new one, whose weights
            are fitted to the text.
    """

    layers: int = 1
    init: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.layers >= 1, f"a head has K = 1 layer or more, not {self.layers}")


class TargetFeatures(NamedTuple):
    """The target's features that its own logits for drafted tokens come from: `rows` names each draft's among
    `features`, as several drafts may be of one token; None: one each, in order.
    """

    features: Float[Tensor, "m hidden"]
    rows: Int[Tensor, " n"] | None = None

    def each(self, values: Float[Tensor, "m width"]) -> Float[Tensor, "n width"]:
        """Of what was computed from the features, each draft's."""
        return values if self.rows is None else values[self.rows]


class Drafts(NamedTuple):
    """What a head drafts at all positions of some texts, where it learns."""

    logits: Float[Tensor, "n vocab"]  # over its own tokens
    weights: Float[Tensor, " n"]  # their parts in losses; they sum to the labels of the batch, or a little less
    hidden: Float[Tensor, "n hidden"]  # the target's feature that the draft began from
    truth: TargetFeatures  # what the target says of the same tokens
    loss: Float[Tensor, ""]  # supervised, summed


class HeadTask(Task):
    """A head as a `Task`.

    Args:
        head: in float32; what it computes in is the trainer's affair.
        frozen: the target's hidden states that it reads.
        objective: see `soft_labels`.
    """

    def __init__(self, head: TrainedHead, frozen: HiddenStates, objective: str) -> None:
        self.head, self.frozen, self.objective = head, frozen, objective

    @property
    def module(self) -> TrainedHead:
        return self.head

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        self.head.config = replace(self.head.config, trained=about)
        self.head.save(folder)

    def distil(
        self, logits: Float[Tensor, "n vocab"], weights: Float[Tensor, " n"], wanted: tuple[Tensor, Tensor, Tensor]
    ) -> Float[Tensor, ""]:
        """Cross-entropy against what the target says, or the text; `wanted`: labels, `top_ids`, `top_logp`."""
        tokens, shares = soft_labels(self.objective, *wanted)
        return soft_cross_entropy(logits, self.head.labels(tokens), shares * weights[:, None])

    def ids(self, outputs: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """The token ids that the head's outputs stand for."""
        return outputs if self.head.tokens is None else self.head.tokens[outputs]


class FeatureTask(HeadTask):
    """A head on the target's features, its hidden states after the final norm: what it drafts can be set beside the
    target's own logits for the same token.

    Args:
        matrix: the target's output rows for the head's tokens, which these logits come from.
    """

    def __init__(
        self, head: TrainedHead, frozen: HiddenStates, objective: str, matrix: Float[Tensor, "vocab hidden"]
    ) -> None:
        super().__init__(head, frozen, objective)
        self.matrix = matrix
        self.adjusted = AS_IT_IS  # what the target makes its logits with besides

    def truth(self, features: Float[Tensor, "m hidden"]) -> Float[Tensor, "m vocab"]:
        """The target's logits."""
        return self.adjusted(features.to(self.matrix.dtype) @ self.matrix.T, self.head.tokens)

    def learn(
        self,
        logits: Float[Tensor, "n vocab"],
        weights: Float[Tensor, " n"],
        wanted: tuple[Tensor, Tensor, Tensor],
        truth: TargetFeatures,
    ) -> Float[Tensor, ""]:
        """`distil`, or against all that the target says."""
        if self.objective == WHOLE:
            return whole_cross_entropy(logits, self.truth(truth.features), weights, truth.rows)
        return self.distil(logits, weights, wanted)

    @abstractmethod
    def drafts(self, batch: Batch, learning: bool = True) -> Drafts:
        """What the head drafts for a batch.

        Args:
            learning: with what is added to make it learn more; False: as it drafts.
        """

    def loss(self, batch: Batch) -> Float[Tensor, ""]:
        return self.drafts(batch).loss


def ahead(values: Tensor, by: int, fill: float) -> Tensor:
    """Of every position of `[batch, tokens, ...]` the value `by` positions on (before, if negative); `fill` where there
    is none.
    """
    moved = values.roll(-by, 1)
    moved[:, slice(-by, None) if by > 0 else slice(0, -by)] = fill
    return moved
