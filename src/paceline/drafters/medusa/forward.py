"""Medusa's heads at work: all of them at once, over one feature a request."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from paceline.drafters.medusa.head import OF_TARGET, MedusaHead
from paceline.drafting.output_rows import output_bias
from paceline.drafting.own_layers import fast_linear
from paceline.drafting.parallel import Guesses
from paceline.targets.target import Target


class MedusaForward:
    """What `MedusaHead.forward` computes, with weights laid out as the target's are: one matrix for the first blocks,
    which all read the same, then one product a layer.
    """

    def __init__(self, head: MedusaHead, target: Target) -> None:
        self.heads, self.target = head.config.heads, target
        first, *rest = head.weight.detach()
        self.first = fast_linear(first.flatten(0, 1), head.bias.detach()[0].flatten(), target)
        self.rest = [(w.mT.contiguous(), b[:, None]) for w, b in zip(rest, head.bias.detach()[1:], strict=True)]
        self.outputs: list[Callable[[Tensor], Tensor]]
        if head.config.vocabulary == OF_TARGET and head.tokens is None:
            self.outputs = [target.logits]
        else:
            assert head.matrix is not None  # `MedusaHead.check` has seen the target
            bias = output_bias(target, head.tokens) if head.config.vocabulary == OF_TARGET else None
            self.outputs = [fast_linear(matrix, bias, target, output=True) for matrix in head.matrix.detach()]

    def __call__(self, hidden: Float[Tensor, "batch hidden"]) -> Guesses:
        """Of the target's last hidden states, before its final norm."""
        features = self.target.features(hidden)
        blocks = functional.silu(self.first(features)).view(len(features), self.heads, -1)
        by_head = (features[:, None] + blocks).transpose(0, 1).contiguous()
        for weight, bias in self.rest:
            by_head = by_head + functional.silu(torch.baddbmm(bias, by_head, weight))
        states = by_head.transpose(0, 1)
        if len(self.outputs) == 1:
            logits = self.outputs[0](states.flatten(0, 1)).view(*states.shape[:2], -1)
        else:
            logits = torch.stack([output(rows) for output, rows in zip(self.outputs, by_head, strict=True)], 1)
        return Guesses(states, logits)
