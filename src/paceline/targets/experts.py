"""A mixture of experts of the torch tier: every token passes the few that its router chose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

if TYPE_CHECKING:
    from paceline.targets.linear import Linear


@dataclass
class FusedExperts:
    """Tokens are grouped by expert. A token's sum goes over its experts in the order of their numbers, so that it does
    not depend on the tokens beside it.
    """

    router: Linear
    up: Sequence[Linear]  # of each expert: the gate's rows, then the others
    down: Sequence[Linear]
    shared_gate: Linear | None  # of the MLP that all tokens pass besides; None: its result counts whole
    chosen: int  # experts of a token
    normalised: bool  # their weights sum to 1

    def linears(self, chosen: int | None = None) -> list[Linear]:
        """All, or those that a token passes which chooses so many experts."""
        gate = [self.shared_gate] if self.shared_gate else []
        return [self.router, *self.up[:chosen], *self.down[:chosen], *gate]

    def __call__(
        self, x: Float[Tensor, "tokens hidden"], activate: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "tokens hidden"]:
        weights, experts = self.router(x).float().softmax(-1).topk(self.chosen)
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        weights, out = weights.to(x.dtype), torch.zeros_like(x)
        for expert in experts.unique().tolist():
            token, place = (experts == expert).nonzero(as_tuple=True)
            result = self.down[expert](activate(self.up[expert](x[token])))
            out.index_add_(0, token, result * weights[token, place, None])
        return out

    def gated(self, x: Float[Tensor, "tokens hidden"], shared: Tensor) -> Tensor:
        """What the MLP made of the tokens that all pass, as much as it counts."""
        if self.shared_gate is None:
            return shared
        gate = self.shared_gate(x)
        # A sigmoid. Torch's own takes the last few numbers of a tensor, whichever these are, by another routine.
        return shared * torch.cat([gate, torch.zeros_like(gate)], -1).softmax(-1)[:, :1]
