"""What happens between the matrix products, in torch's own operations: any device, any floating-point type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from paceline.targets.reach import Reach, ring_mask

if TYPE_CHECKING:
    from paceline.targets.cache import KVCache
    from paceline.targets.fused import FusedLayer, Shape
    from paceline.targets.parts import Norm
    from paceline.targets.rope import RopeTables
    from paceline.targets.span import Span


class PlainPlan(NamedTuple):
    span: Span
    angles: list[tuple[Tensor, Tensor]]  # by a layer's `rope`: cos and sin, [batch, 1, width, rotary / 2]
    masks: dict[int, tuple[int, Tensor | None]]  # by its `window`: the first slot seen; [batch, 1, group * width, seen]


class PlainOps:
    exact = False

    def __init__(self, shape: Shape, ropes: Sequence[RopeTables], context: int) -> None:
        self.shape, self.ropes, self.context = shape, ropes, context

    def plan(self, span: Span, cache: KVCache) -> PlainPlan:
        positions = span.positions.clamp(max=self.context - 1)
        for rope in self.ropes:
            rope.grow(cache.capacity)
        return PlainPlan(
            span, [(rope.cos[positions][:, None], rope.sin[positions][:, None]) for rope in self.ropes], {}
        )

    def _mask(self, plan: PlainPlan, window: int, dtype: torch.dtype) -> tuple[int, Tensor | None]:
        span, group, first = plan.span, self.shape.heads // self.shape.kv_heads, 0
        if window:
            first = max(int(span.starts.min()) + 1 - window, 0)
            mask: Tensor | None = ring_mask(span, Reach(window=window), span.end, dtype)[..., first:]
        else:
            mask = span.mask(dtype, explicit=bool(self.shape.score_cap))
        if mask is None and span.width > 1:  # plain causal, which the rows of a group do not let SDPA see
            seen = torch.ones(span.width, span.width, dtype=torch.bool, device=span.ids.device).tril()
            mask = seen.expand(span.batch, 1, -1, -1)
        return first, None if mask is None else mask.repeat(1, 1, group, 1)

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
        if layer.window not in plan.masks:
            plan.masks[layer.window] = self._mask(plan, layer.window, keys.dtype)
        first, mask = plan.masks[layer.window]
        if first:
            keys, values = keys[:, :, first:], values[:, :, first:]
        # The heads that share keys become rows of one head: no backend then has to repeat the keys.
        rows = queries.reshape(batch, shape.kv_heads, -1, shape.head_dim)
        if shape.score_cap:
            assert mask is not None
            scores = ((rows @ keys.mT).float() * (shape.score_scale / shape.score_cap)).tanh_() * shape.score_cap + mask
            out: Tensor = scores.softmax(-1).to(values.dtype) @ values
        else:
            out = functional.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=shape.score_scale)
        return out.view(batch, shape.heads, width, -1).transpose(1, 2).reshape(batch * width, -1)

    def activate(self, up: Tensor) -> Tensor:
        if not self.shape.gated:
            return functional.gelu(up)
        gate, up = up.chunk(2, -1)
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


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = x.split((half, half, x.shape[-1] - 2 * half), -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)
