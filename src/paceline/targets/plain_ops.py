"""What happens between the matrix products, in torch's own operations: any device, any floating-point type."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from paceline.targets.cache import KVCache
    from paceline.targets.fused import FusedLayer, Shape
    from paceline.targets.parts import Norm
    from paceline.targets.rope import RopeTables
    from paceline.targets.span import Span


class PlainPlan(NamedTuple):
    span: Span
    cos: Tensor  # [batch, 1, width, rotary / 2]
    sin: Tensor
    mask: Tensor | None  # [batch, 1, group * width, end]


class PlainOps:
    exact = False

    def __init__(self, shape: Shape, rope: RopeTables, context: int) -> None:
        self.shape, self.rope, self.context = shape, rope, context

    def plan(self, span: Span, cache: KVCache) -> PlainPlan:
        self.rope.grow(cache.capacity)
        positions = span.positions.clamp(max=self.context - 1)
        group = self.shape.heads // self.shape.kv_heads
        mask = span.mask(self.rope.cos.dtype)
        if mask is None and span.width > 1:  # plain causal, which the rows of a group do not let SDPA see
            seen = torch.ones(span.width, span.width, dtype=torch.bool, device=span.ids.device).tril()
            mask = seen.expand(span.batch, 1, -1, -1)
        mask = None if mask is None else mask.repeat(1, 1, group, 1)
        return PlainPlan(span, self.rope.cos[positions][:, None], self.rope.sin[positions][:, None], mask)

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
            queries, keys = self.norm(queries, None, layer.query_norm), self.norm(keys, None, layer.key_norm)
        queries, keys = self._rotate(queries, plan), self._rotate(keys, plan)
        keys, values = cache.write(index, plan.span, keys, values)
        # The heads that share keys become rows of one head: no backend then has to repeat the keys.
        rows = queries.reshape(batch, shape.kv_heads, -1, shape.head_dim)
        out = functional.scaled_dot_product_attention(rows, keys, values, attn_mask=plan.mask, scale=shape.score_scale)
        return out.view(batch, shape.heads, width, -1).transpose(1, 2).reshape(batch * width, -1)

    def activate(self, up: Tensor) -> Tensor:
        if not self.shape.gated:
            return functional.gelu(up)
        gate, up = up.chunk(2, -1)
        return functional.silu(gate).mul_(up)

    def _rotate(self, x: Tensor, plan: PlainPlan) -> Tensor:
        half = self.rope.size // 2
        a, b, rest = x.split((half, half, x.shape[-1] - 2 * half), -1)
        return torch.cat((a * plan.cos - b * plan.sin, b * plan.cos + a * plan.sin, rest), -1)
