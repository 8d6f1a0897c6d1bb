"""Heads that share the target's word embeddings and, most of them, its output matrix."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from paceline.drafting.heads import TrainedHead
from paceline.drafting.output_rows import output_bias, output_rows
from paceline.targets.families import AS_IT_IS, Adjustment
from paceline.targets.target import Target


class SharingHead(TrainedHead):
    """A head that shares matrices of the target, which are neither trained nor stored: only training needs them here.

    Attributes:
        fc: what the target's hidden states go through first.
        embedding: of all tokens; None until the target is known.
        matrix: the output matrix, of the tokens that can be drafted; None until the target is known.
    """

    fc: nn.Linear
    adjusted: Adjustment = AS_IT_IS  # what the target makes its logits with besides
    embedding: Float[Tensor, "all hidden"] | None
    matrix: Float[Tensor, "vocab hidden"] | None

    @property
    def shares_output(self) -> bool:
        """Whether the output matrix is the target's."""
        return True

    def know(
        self,
        embedding: Float[Tensor, "all hidden"],
        output: Float[Tensor, "all hidden"],
        adjusted: Adjustment = AS_IT_IS,
    ) -> None:
        """Take the target's matrices, which the head shares.

        Args:
            adjusted: what makes the target's logits besides; of a cap, heads that draft some tokens only do without.
        """
        self.embedding = embedding
        if self.shares_output:
            self.adjusted = adjusted if self.tokens is None else adjusted._replace(cap=None)
            self.matrix = output if self.tokens is None else output[self.tokens]

    def own_outputs(
        self, target: Target
    ) -> tuple[Float[Tensor, "vocab hidden"], Float[Tensor, " vocab"] | None] | None:
        """Output matrix and bias for the tokens that can be drafted; None: the target's, for all tokens."""
        if not self.shares_output:
            assert self.matrix is not None  # it was loaded with the head
            return self.matrix.to(target.device, target.dtype), None
        return None if self.tokens is None else (output_rows(target, self.tokens), output_bias(target, self.tokens))

    def embedded(self, ids: Int[Tensor, "batch tokens"], like: Tensor) -> Float[Tensor, "batch tokens hidden"]:
        """The tokens' embeddings, in the type of another tensor."""
        if self.embedding is None:
            raise ValueError("this head shares the target's embeddings, which it does not know yet")
        return functional.embedding(ids, self.embedding).to(like.dtype)

    def told_by_matrix(self, states: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        """Logits of the tokens that can be drafted."""
        if self.matrix is None:
            raise ValueError("this head shares the target's output matrix, which it does not know yet")
        return self.adjusted(functional.linear(states, self.matrix.to(states.dtype)), self.tokens)

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """Random matrices to begin with. What layers add is small, not zero: then gradients reach their queries and
        keys from the start.
        """
        drawn = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                size = 0.1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.5
                weight.copy_(torch.randn(weight.shape, generator=drawn) * size * weight.shape[-1] ** -0.5)

    def parameter_counts(self) -> dict[str, int]:
        """Parameters, all of them trained, by part: `fc`, `layers` with their norms; and their `total`."""
        fc, total = (sum(weight.numel() for weight in part.parameters()) for part in (self.fc, self))
        return {"fc": fc, "layers": total - fc, "total": total}
