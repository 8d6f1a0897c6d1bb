"""EAGLE's heads at work, on the target's own tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from paceline.drafters.eagle.fused_head import Eagle3Head, WideLayer
from paceline.drafters.eagle.head import EagleHead
from paceline.drafting.output_rows import output_rows
from paceline.drafting.own_layers import fast_layers, fast_linear
from paceline.drafting.stepping.forward import Made, SteppingForward
from paceline.targets.cache import KVCache
from paceline.targets.linear import linear_module
from paceline.targets.span import Span
from paceline.targets.target import Target

if TYPE_CHECKING:
    from paceline.drafters.eagle.native_step import NativeSteps


class EagleForward(SteppingForward):
    """What `EagleHead.forward` or `Eagle3Head.forward` computes, on the target's own tier.

    Args:
        top: how many of the likeliest tokens to tell, where the logits come with them.

    Attributes:
        count: decoder layers.
        layers: the head's own, behind the block view: its final norm and, unless these are all of the target's, the
            rows of its output matrix come with them.
    """

    def __init__(self, head: EagleHead | Eagle3Head, target: Target, top: int = 1) -> None:
        super().__init__(target, head.reads or (target.num_layers,), head.shallow)
        outputs = target.vocab_size if head.tokens is None else len(head.tokens)
        self.count, self.top = head.config.layers, min(top, outputs)
        self.fc = fast_linear(head.fc.weight.detach(), None if head.fc.bias is None else head.fc.bias.detach(), target)
        self.token_norm: nn.Module | None = None  # of EAGLE-3: of what its first layer reads beside the state,
        self.state_norm: nn.Module = nn.Identity()  # and of the state that passes by it, where that is normed
        self.token_in: Callable[[Tensor], Tensor] | None = None  # where the token is added to the state
        fused = self.taps
        if isinstance(head, Eagle3Head):
            fused, self.token_norm = tuple(head.config.taps), head.entry_norm
            if head.token_in is not None:
                self.token_in, self._normed = fast_linear(head.token_in.weight.detach(), None, target), head.normed
            self._take_layers(head)
        self._fused = [self.taps.index(tap) for tap in fused]
        rows = self._rows(head)
        unused = torch.zeros(1, target.config.hidden_size, dtype=target.dtype, device=target.device)
        head.lm.set_output_embeddings(linear_module(unused if rows is None else rows))
        self.layers = fast_layers(head.lm, target)
        self._every = rows is None
        self._steps = self._native_steps(head)

    def _native_steps(self, head: EagleHead | Eagle3Head) -> NativeSteps | None:
        """None: a step is made of parts."""
        if self.layers.tier != "native" or (self.token_norm is not None and self.token_in is None):
            return None
        from paceline.drafters.eagle.native_step import NativeSteps

        layers: Any = self.layers
        target: Any = self.target
        fc: Any = self.fc
        token_in: Any = self.token_in
        return NativeSteps(head, layers, target, fc, token_in)

    def _take_layers(self, head: Eagle3Head) -> None:
        """Make the head's modules ones that tiers take over."""
        first, norm = head.decoder.layers[0], head.norm
        if isinstance(first, WideLayer):
            if first.norm_first:
                self.state_norm, first.input_layernorm, first.norm_first = first.input_layernorm, nn.Identity(), False
            if self.target.tier != "reference":
                head.decoder.layers[0] = first.plain()
        head.decoder.norm = type(first.post_attention_layernorm)(len(norm.weight), eps=norm.eps)
        head.decoder.norm.weight = norm.weight

    def _rows(self, head: EagleHead | Eagle3Head) -> Float[Tensor, "vocab hidden"] | None:
        """The output matrix for the tokens that can be drafted; None: the target's, all of it."""
        if not head.shares_output:
            assert head.matrix is not None  # it was loaded with the head
            return head.matrix.to(self.target.device, self.target.dtype)
        return None if head.tokens is None else output_rows(self.target, head.tokens)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return self.layers.new_cache(batch, capacity)

    def features(self, states: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        return self.layers.features(states)

    def head(self, states: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        return self.target.logits(self.features(states)) if self._every else self.layers.head(states)

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
        fused, asked = [taps[at] for at in self._fused], 0 if self._every else last
        return self._with_logits(*self._steps.roots(fused, span, cache, asked, self.top, tokens), last)

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

    def fused(self, taps: Sequence[Float[Tensor, "batch width hidden"]]) -> Float[Tensor, "batch width hidden"]:
        """The target's feature, or several of its states."""
        if self.token_norm is None:
            return self.target.features(taps[0])
        hidden = torch.cat([taps[at] for at in self._fused], -1)
        if self.token_in is not None:
            hidden = self._normed(hidden)
        return self.fc(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

    def run_layers(
        self, states: Float[Tensor, "batch width hidden"], span: Span, cache: KVCache, tokens: Tensor | None
    ) -> Float[Tensor, "batch width hidden"]:
        embedded = self.target.embed(span) if tokens is None else tokens
        if self.token_norm is None:
            entered, beside = self.fc(torch.cat([embedded, states], -1).flatten(0, 1)).view(*states.shape), None
        elif self.token_in is not None:
            token = self.token_in(self.token_norm(embedded).flatten(0, 1))
            entered, beside = states + token.view(*states.shape), None
        else:
            entered, beside = self.state_norm(states), self.token_norm(embedded)
        return self.layers.layers(entered, span, cache, 0, self.count, beside=beside)
