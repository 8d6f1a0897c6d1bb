"""EAGLE's head at work, on the target's own tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.drafting.own_layers import fast_layers, fast_linear
from paceline.drafting.stepping.forward import Made, SteppingForward
from paceline.targets.cache import KVCache
from paceline.targets.linear import linear_module
from paceline.targets.span import Span
from paceline.targets.target import Target

if TYPE_CHECKING:
    from paceline.drafters.eagle.eagle3_head import Eagle3Head
    from paceline.drafters.eagle.head import EagleHead
    from paceline.drafters.eagle.native_step import NativeSteps


class EagleForward(SteppingForward):
    """What `EagleHead.forward` computes: `fc([embedding, feature])`, then the layers (section 4.1).

    Args:
        top: how many of the likeliest tokens to tell, where the logits come with them.

    Attributes:
        count: decoder layers.
        layers: the head's own, behind the block view: its final norm and, unless these are all of the target's, the
            rows of its output matrix come with them.
        token_in: where the token is added to the state, what its embedding goes through.
    """

    token_in: Callable[[Tensor], Tensor] | None = None

    def __init__(self, head: EagleHead | Eagle3Head, target: Target, top: int = 1) -> None:
        super().__init__(target, head.reads or (target.num_layers,), head.shallow)
        outputs = target.vocab_size if head.tokens is None else len(head.tokens)
        self.count, self.top = head.config.layers, min(top, outputs)
        self.fc = fast_linear(head.fc.weight.detach(), None if head.fc.bias is None else head.fc.bias.detach(), target)
        own = head.own_outputs(target)
        unused = torch.zeros(1, target.config.hidden_size, dtype=target.dtype, device=target.device)
        head.lm.set_output_embeddings(linear_module(*(own or (unused,))))
        self.layers = fast_layers(head.lm, target)
        self._every = own is None
        self._steps = self._native_steps(head)

    def _native_steps(self, head: EagleHead | Eagle3Head) -> NativeSteps | None:
        """None: a step is made of parts."""
        if self.layers.tier != "native":
            return None
        from paceline.drafters.eagle.native_step import NativeSteps

        own: Any = self  # whose parts are all of that tier
        return NativeSteps(head, own.layers, own.target, own.fc, own.token_in)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return self.layers.new_cache(batch, capacity)

    def features(self, states: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        return self.layers.features(states)

    def head(self, states: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        return self.target.logits(self.features(states)) if self._every else self.layers.head(states)

    # -- a step ----------------------------------------------------------------------------------------------------
    def fused(self, taps: Sequence[Float[Tensor, "batch width hidden"]]) -> Float[Tensor, "batch width hidden"]:
        """The target's feature."""
        return self.target.features(taps[0])

    def run_layers(
        self, states: Float[Tensor, "batch width hidden"], span: Span, cache: KVCache, tokens: Tensor | None
    ) -> Float[Tensor, "batch width hidden"]:
        both = torch.cat([self.target.embed(span), states], -1)
        entered = self.fc(both.flatten(0, 1)).view(*states.shape)
        return self.layers.layers(entered, span, cache, 0, self.count)

    # -- the same in one call of the native tier -------------------------------------------------------------------
    def to_fuse(self, taps: Sequence[Float[Tensor, "batch width hidden"]]) -> Sequence[Tensor]:
        """Of what is read, what `fused` makes one state of."""
        return taps

    def _read(
        self,
        taps: Sequence[Float[Tensor, "batch width hidden"]],
        span: Span,
        cache: KVCache,
        tokens: Tensor | None = None,
        last: int = 0,
    ) -> Made:
        if not self._steps:
            return super()._read(taps, span, cache, tokens, last)
        asked = 0 if self._every else last
        return self._with_logits(*self._steps.roots(self.to_fuse(taps), span, cache, asked, self.top, tokens), last)

    def _run(
        self,
        states: Float[Tensor, "batch width hidden"],
        span: Span,
        cache: KVCache,
        tokens: Tensor | None = None,
        last: int = 0,
    ) -> Made:
        if not self._steps:
            return super()._run(states, span, cache, tokens, last)
        asked = 0 if self._every else last
        return self._with_logits(*self._steps.nodes(states, span, cache, asked, self.top, tokens), last)
