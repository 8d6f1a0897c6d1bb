"""What happens between the matrix products, by the kernels of this package: CPU, float32, bits that do not depend on
the width of the pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from paceline.targets import attention as fields
from paceline.targets.attention import ATTEND_FIELDS, TILE, attend
from paceline.targets.kernels import add_norm, clamped_swiglu, gelu, gelu_tanh_gate, silu_gate
from paceline.targets.narrow_layers import NarrowLayers
from paceline.targets.parts import CLAMPED
from paceline.targets.team import addresses, bits

if TYPE_CHECKING:
    from paceline.targets.cache import KVCache
    from paceline.targets.fused import FusedLayer, Weights
    from paceline.targets.parts import Norm
    from paceline.targets.rope import RopeTables
    from paceline.targets.span import Span

_ALONE = 1 << 14  # elements below which waking the other threads costs more than it saves


class ExactPlan:
    """A span as the attention kernel reads it: a table for each layer, and the arrays the tables point to.

    Args:
        packed: the flow has no rows for the span's padding.
    """

    def __init__(self, span: Span, cache: KVCache, ops: ExactOps, threads: int, packed: bool) -> None:
        shape = ops.shape
        for rope in ops.ropes:
            rope.grow(cache.capacity)
        self.span, self.threads = span, threads
        starts = np.ascontiguousarray(span.starts, dtype=np.int64)
        positions = span.positions.clamp(max=ops.context - 1).contiguous().numpy()
        counts, paths = _visible(span, starts)
        firsts = np.arange(span.batch + 1) * span.width
        if packed:
            inside = span.inside
            firsts, positions, counts = np.array([*span.firsts, span.tokens]), positions[inside], counts[inside]
            paths = paths[inside] if paths.size > 1 else paths
        longest = int(counts.max())
        scratch = torch.empty(threads * TILE * (shape.heads // shape.kv_heads) * longest)
        self._held = (starts, firsts, positions, counts, paths, scratch, [(rope.cos, rope.sin) for rope in ops.ropes])
        #: By layers' `rope`: how many dimensions are rotated, and by which tables; the last, -1, is none.
        rotations = np.array([[rope.size, *addresses(rope.cos, rope.sin)] for rope in ops.ropes] + [[0, 0, 0]])
        #: `[layers, ATTEND_FIELDS]`
        self.tables = tables = ops.attention.copy()
        tables[:, fields.BATCH], tables[:, fields.WIDTH], tables[:, fields.OFFSET] = span.batch, span.width, span.offset
        tables[:, fields.LONGEST], tables[:, fields.SCRATCH] = longest, scratch.data_ptr()
        tables[:, fields.STARTS], tables[:, fields.POSITIONS] = starts.ctypes.data, positions.ctypes.data
        tables[:, fields.COUNTS], tables[:, fields.FIRSTS] = counts.ctypes.data, firsts.ctypes.data
        tables[:, fields.PATHS], tables[:, fields.PATH_STRIDE] = (
            paths.ctypes.data,
            paths.shape[-1] if paths.size > 1 else 0,
        )
        tables[:, fields.KEYS : fields.BASES + 1] = cache.addresses
        tables[:, fields.WINDOW] = [layer.window for layer in ops.layers]
        tables[:, [fields.ROTARY, fields.COS, fields.SIN]] = rotations[ops.ropes_of_layers]


class ExactOps:
    exact = True

    def __init__(self, weights: Weights, ropes: Sequence[RopeTables], context: int) -> None:
        self.shape, self.layers, self.ropes, self.context = weights.shape, weights.layers, ropes, context
        kernels = {"silu": silu_gate, "gelu_tanh": gelu_tanh_gate, CLAMPED: clamped_swiglu, "gelu": gelu}
        self.activation = kernels[weights.shape.activation]
        self.numbers = [bits(number) for number in weights.shape.swiglu]
        self.ropes_of_layers = [layer.rope for layer in weights.layers]
        #: `[layers, ATTEND_FIELDS]`: what attention knows of each layer before any pass.
        self.attention = _attention(weights)
        self._narrow = NarrowLayers.of(weights, self.activation, self.numbers)

    def plan(self, span: Span, cache: KVCache, packed: bool = False) -> ExactPlan:
        return ExactPlan(span, cache, self, torch.get_num_threads(), packed)

    def together(
        self, plan: ExactPlan, flow: Tensor, start: int, stop: int, taps: Mapping[int, Tensor]
    ) -> Tensor | None:
        """See `torch_tier.Operations`: not where the pass is too wide, or the model has layers that cannot."""
        if self._narrow is None or len(flow) > self._narrow.widest or start == stop:
            return None
        return self._narrow(plan.tables, flow, start, stop, plan.threads, taps)

    def norm(self, hidden: Tensor, delta: Tensor | None, norm: Norm | None) -> Tensor:
        if norm is None:
            return hidden if delta is None else hidden.add_(delta)
        out = torch.empty_like(hidden)
        rows, size = hidden.shape
        table = [*addresses(hidden, delta, norm.weight, norm.bias, out), rows, size, bits(norm.eps), 0]
        add_norm(np.array(table), _threads(out))
        return out

    def attend(self, plan: ExactPlan, _cache: KVCache, _layer: FusedLayer, index: int, qkv: Tensor) -> Tensor:
        out = qkv.new_empty(qkv.shape[0], self.shape.heads * self.shape.head_dim)
        table = plan.tables[index]
        table[fields.QKV], table[fields.OUT] = qkv.data_ptr(), out.data_ptr()
        attend(table, plan.threads)
        return out

    def activate(self, up: Tensor) -> Tensor:
        rows, size = up.shape
        if self.shape.gated:
            size //= 2
        out = up.new_empty(rows, size)
        table = np.array([*addresses(up, out), rows, size, *self.numbers])
        self.activation(table, _threads(out))
        return out


def _attention(weights: Weights) -> np.ndarray:
    shape = weights.shape
    tables = np.zeros((len(weights.layers), ATTEND_FIELDS), dtype=np.int64)
    tables[:, fields.HEADS], tables[:, fields.KV_HEADS] = shape.heads, shape.kv_heads
    tables[:, fields.HEAD_DIM], tables[:, fields.NORM_WHOLE] = shape.head_dim, shape.norm_whole
    tables[:, fields.SCORE_SCALE], tables[:, fields.SCORE_CAP] = bits(shape.score_scale), bits(shape.score_cap)
    for table, layer in zip(tables, weights.layers, strict=True):
        table[fields.SINKS] = addresses(layer.sinks)[0]
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = addresses(layer.query_norm.weight, layer.key_norm.weight)
            table[fields.QUERY_NORM], table[fields.KEY_NORM] = norms
            table[fields.HEAD_EPS] = bits(layer.query_norm.eps)
    return tables


def _visible(span: Span, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many keys are in each token's list, `[batch, width]`, and the paths as the attention kernel wants them."""
    if span.ancestors is None:
        seen = starts[:, None] + np.arange(span.offset + 1, span.offset + span.width + 1)
        return seen, np.zeros(1, dtype=np.int64)
    ancestors = span.ancestors.numpy()
    paths = np.argsort(~ancestors, axis=2, kind="stable")  # the visible slots first, in their order
    return starts[:, None] + ancestors.sum(2), np.pad(paths, ((0, 0), (0, 0), (1, 0)))


def _threads(out: Tensor) -> int:
    return 1 if out.numel() < _ALONE else torch.get_num_threads()
