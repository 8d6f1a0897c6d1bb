"""EAGLE-3's head at work, on the target's own tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from paceline.drafters.eagle.eagle3_head import Eagle3Head, WideLayer
from paceline.drafters.eagle.forward import EagleForward
from paceline.drafting.own_layers import fast_linear
from paceline.targets.cache import KVCache
from paceline.targets.span import Span
from paceline.targets.target import Target

if TYPE_CHECKING:
    from paceline.drafters.eagle.head import EagleHead
    from paceline.drafters.eagle.native_step import NativeSteps


class Eagle3Forward(EagleForward):
    """What `Eagle3Head.forward` computes: `fc` fuses states of several depths; the token stands beside the state, or is
    added to it.

    Attributes:
        token_norm: of what comes in of a token.
        state_norm: of the state that passes by the first layer's attention, where that is normed.
    """

    def __init__(self, head: Eagle3Head, target: Target, top: int = 1) -> None:
        self.token_norm: nn.Module = head.entry_norm
        self.state_norm: nn.Module = nn.Identity()
        if head.token_in is not None:
            self.token_in = fast_linear(head.token_in.weight.detach(), None, target)
        self._normed, self._fused = head.normed, [head.reads.index(tap) for tap in head.config.taps]
        self._take_layers(head, target)
        super().__init__(head, target, top)

    def _take_layers(self, head: Eagle3Head, target: Target) -> None:
        """Make the head's modules ones that tiers take over."""
        first, norm = head.decoder.layers[0], head.norm
        if isinstance(first, WideLayer):
            if first.norm_first:
                self.state_norm, first.input_layernorm, first.norm_first = first.input_layernorm, nn.Identity(), False
            if target.tier != "reference":
                head.decoder.layers[0] = first.plain()
        head.decoder.norm = type(first.post_attention_layernorm)(len(norm.weight), eps=norm.eps)
        head.decoder.norm.weight = norm.weight

    def _native_steps(self, head: EagleHead | Eagle3Head) -> NativeSteps | None:
        return None if self.token_in is None else super()._native_steps(head)

    def to_fuse(self, taps: Sequence[Float[Tensor, "batch width hidden"]]) -> Sequence[Tensor]:
        return [taps[at] for at in self._fused]

    def fused(self, taps: Sequence[Float[Tensor, "batch width hidden"]]) -> Float[Tensor, "batch width hidden"]:
        hidden = torch.cat(list(self.to_fuse(taps)), -1)
        if self.token_in is not None:
            hidden = self._normed(hidden)
        return self.fc(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

    def run_layers(
        self, states: Float[Tensor, "batch width hidden"], span: Span, cache: KVCache, tokens: Tensor | None
    ) -> Float[Tensor, "batch width hidden"]:
        token = self.token_norm(self.target.embed(span) if tokens is None else tokens)
        if self.token_in is None:
            return self.layers.layers(self.state_norm(states), span, cache, 0, self.count, beside=token)
        entered = states + self.token_in(token.flatten(0, 1)).view(*states.shape)
        return self.layers.layers(entered, span, cache, 0, self.count)
