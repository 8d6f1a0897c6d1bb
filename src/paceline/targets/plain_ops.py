"""What happens between the matrix products, in torch's own operations: any device, any floating-point type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from paceline.targets.parts import CLAMPED
from paceline.targets.reach import Reach, ring_mask
from paceline.targets.sliding import SlidingCache

if TYPE_CHECKING:
    from paceline.targets.cache import KVCache
    from paceline.targets.fused import FusedLayer, Weights
    from paceline.targets.parts import Norm
    from paceline.targets.rope import RopeTables
    from paceline.targets.span import Span


class PlainPlan(NamedTuple):
    span: Span
    near: Span  # as layers with windows see it, whose slots may begin later
    angles: list[tuple[Tensor, Tensor]]  # by a layer's `rope`: cos and sin, [batch, 1, width, rotary / 2]
    masks: dict[int, tuple[int, Tensor | None]]  # by its `window`: the first slot seen; [batch, 1, group * width, seen]


class PlainOps:
    exact = False

    def __init__(self, weights: Weights, ropes: Sequence[RopeTables], context: int) -> None:
        self.shape, self.ropes, self.context = weights.shape, ropes, context

    def plan(self, span: Span, cache: KVCache, packed: bool = False) -> PlainPlan:
        assert not packed
        positions = span.positions.clamp(max=self.context - 1)
        for rope in self.ropes:
            rope.grow(cache.capacity)
        near = span.behind(cache.bases) if isinstance(cache, SlidingCache) else span
        return PlainPlan(
            span, near, [(rope.cos[positions][:, None], rope.sin[positions][:, None]) for rope in self.ropes], {}
        )

    def forget(self) -> None:
        """Nothing is kept."""

    def _mask(self, plan: PlainPlan, window: int, dtype: torch.dtype, explicit: bool) -> tuple[int, Tensor | None]:
        span, group, first = plan.near if window else plan.span, self.shape.heads // self.shape.kv_heads, 0
        if window:
            first = max(int(span.starts.min()) + 1 - window, 0)
            mask: Tensor | None = ring_mask(span, Reach(window=window), span.end, dtype)[..., first:]
        else:
            mask = span.mask(dtype, explicit=explicit)
        if mask is None and span.width > 1:  # plain causal, which the rows of a group do not let SDPA see
            seen = torch.ones(span.width, span.width, dtype=torch.bool, device=span.ids.device).tril()
            mask = seen.expand(span.batch, 1, -1, -1)
        return first, None if mask is None else mask.repeat(1, 1, group, 1)

    def together(self, *_of_a_pass: object) -> None:
        return None

    def goes_whole(self, _rows: int) -> bool:
        return False

    def whole(self, *_of_a_pass: object) -> Tensor:
        raise AssertionError("no pass goes whole here")

    def norm(self, hidden: Tensor, delta: Tensor | None, norm: Norm | None) -> Tensor:
        if delta is not None:
            hidden += delta
        if norm is None:
            return hidden
        size = (hidden.shape[-1],)
        if not norm.centred:
            return functional.rms_norm(hidden, size, norm.weight, norm.eps)
        return functional.layer_norm(hidden, size, norm.weight, norm.bias, norm.eps)

    def attend(self, plan: PlainPlan, cache: KVCache, layer: FusedLayer, index: int, qkv: Tensor) -> Tensor:
        shape, (batch, width) = self.shape, plan.span.ids.shape
        parts = (shape.heads, shape.kv_heads, shape.kv_heads)
        queries, keys, values = qkv.view(batch, width, -1, shape.head_dim).transpose(1, 2).split(parts, 1)
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = self._norm_heads(queries, layer.query_norm), self._norm_heads(keys, layer.key_norm)
        if layer.rope >= 0:
            queries, keys = (_rotate(x, *plan.angles[layer.rope]) for x in (queries, keys))
        keys, values = cache.write(index, plan.span, keys, values)
        by_hand = bool(shape.score_cap) or layer.sinks is not None
        if layer.window not in plan.masks:
            plan.masks[layer.window] = self._mask(plan, layer.window, keys.dtype, by_hand)
        first, mask = plan.masks[layer.window]
        if first:
            keys, values = keys[:, :, first:], values[:, :, first:]
        # The heads that share keys become rows of one head: no backend then has to repeat the keys.
        rows = queries.reshape(batch, shape.kv_heads, -1, shape.head_dim)
        if by_hand:
            assert mask is not None
            scores = (rows @ keys.mT).float() * shape.score_scale
            if shape.score_cap:
                scores = (scores / shape.score_cap).tanh_() * shape.score_cap
            shares = _softmax(scores + mask, layer.sinks, shape.kv_heads)
            out: Tensor = shares.to(values.dtype) @ values
        else:
            out = functional.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=shape.score_scale)
        return out.view(batch, shape.heads, width, -1).transpose(1, 2).reshape(batch * width, -1)

    def activate(self, up: Tensor) -> Tensor:
        if not self.shape.gated:
            return functional.gelu(up)
        gate, up = up.chunk(2, -1)
        if self.shape.activation == CLAMPED:
            alpha, limit = self.shape.swiglu
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return (up + 1) * (gate * torch.sigmoid(gate * alpha))
        if self.shape.activation == "gelu_tanh":
            gated: Tensor = functional.gelu(gate, approximate="tanh") * up
            return gated
        return functional.silu(gate).mul_(up)

    def _norm_heads(self, x: Tensor, norm: Norm) -> Tensor:
        if not self.shape.norm_whole:
            return self.norm(x, None, norm)
        whole = self.norm(x.transpose(1, 2).flatten(2), None, norm)  # [batch, width, heads * head_dim]
        apart: Tensor = whole.unflatten(2, (-1, self.shape.head_dim)).transpose(1, 2)
        return apart


def _softmax(scores: Float[Tensor, "batch kv_heads rows keys"], sinks: Tensor | None, kv_heads: int) -> Tensor:
    """Of rows that are heads by tokens, each with its head's sink beside its keys."""
    if sinks is None:
        return scores.softmax(-1)
    tokens = scores.shape[2] * kv_heads // len(sinks)
    beside = sinks.float().view(kv_heads, -1).repeat_interleave(tokens, 1)[..., None].expand(len(scores), -1, -1, -1)
    return torch.cat([scores, beside], -1).softmax(-1)[..., :-1]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = x.split((half, half, x.shape[-1] - 2 * half), -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)
