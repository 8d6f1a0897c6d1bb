"""What happens between the matrix products, by the kernels of this package: CPU, float32, bits that do not depend on
the width of the pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

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

_NO_PATHS = np.zeros(1, dtype=np.int64)  # of chains
_ALONE = 1 << 14  # elements below which waking the other threads costs more than it saves


class ExactPlan:
    """A span as the attention kernel reads it: a table for each layer, and the arrays the tables point to.

    Args:
        packed: the flow has no rows for the span's padding.
    """

    def __init__(self, span: Span, cache: KVCache, ops: ExactOps, threads: int, packed: bool) -> None:
        self.threads, starts = threads, np.ascontiguousarray(span.starts, dtype=np.int64)
        places, counts, paths = _places(span, starts)
        positions = np.minimum(places, ops.context - 1)
        if packed:
            inside = span.inside
            firsts, positions, counts = np.array([*span.firsts, span.tokens]), positions[inside], counts[inside]
            paths = paths[inside] if paths.size > 1 else paths
        else:
            firsts = np.arange(0, span.batch * span.width + 1, span.width)
        longest = int(counts.max())
        arrays = starts, firsts, positions, counts, paths
        held = np.concatenate([array.reshape(-1) for array in arrays], dtype=np.int64)
        sizes = [8 * array.size for array in arrays[:-1]]
        at = accumulate(sizes, initial=held.ctypes.data)  # addresses of each
        scratch = ops.scratch(threads * TILE * ops.shape.heads // ops.shape.kv_heads * longest)
        layers = ops.layer_tables(cache)
        self._held = held, scratch, layers
        #: `[layers, ATTEND_FIELDS]`
        self.tables = layers.tables.copy()
        stride = paths.shape[-1] if paths.size > 1 else 0
        own = span.batch, span.width, span.offset, *at, stride, longest, scratch.data_ptr()
        self.tables[:, fields.BATCH :] = own


class LayerTables(NamedTuple):
    """What attention knows of the layers and of a cache before any pass.

    Attributes:
        tables: `[layers, ATTEND_FIELDS]`.
        addresses: the cache's.
        ropes: cos and sin that the tables point to.
    """

    tables: np.ndarray
    addresses: np.ndarray
    ropes: list[tuple[Tensor, Tensor]]


class ExactOps:
    exact = True

    def __init__(self, weights: Weights, ropes: Sequence[RopeTables], context: int) -> None:
        self.shape, self.layers, self.ropes, self.context = weights.shape, weights.layers, ropes, context
        kernels = {"silu": silu_gate, "gelu_tanh": gelu_tanh_gate, CLAMPED: clamped_swiglu, "gelu": gelu}
        self.activation = kernels[weights.shape.activation]
        self.numbers = [bits(number) for number in weights.shape.swiglu]
        self._attention = _attention(weights)
        self._known: LayerTables | None = None
        self._scratch = torch.empty(0)
        self._narrow = NarrowLayers.of(weights, self.activation, self.numbers)

    def plan(self, span: Span, cache: KVCache, packed: bool = False) -> ExactPlan:
        return ExactPlan(span, cache, self, torch.get_num_threads(), packed)

    def forget(self) -> None:
        self._known = None

    def scratch(self, size: int) -> Tensor:
        """Room for so many numbers, which every pass writes anew."""
        if len(self._scratch) < size:
            self._scratch = torch.empty(2 * size)
        return self._scratch

    def layer_tables(self, cache: KVCache) -> LayerTables:
        """Made once for a cache, after `KVCache.place`."""
        if self._known is None or self._known.addresses is not cache.addresses:
            for rope in self.ropes:
                rope.grow(cache.capacity)
            ropes = [(rope.cos, rope.sin) for rope in self.ropes]
            # By layers' `rope`: how many dimensions are rotated, and by which tables; the last, -1, is none.
            rotations = np.array([[2 * cos.shape[1], *addresses(cos, sin)] for cos, sin in ropes] + [[0, 0, 0]])
            tables = self._attention.copy()
            tables[:, fields.KEYS : fields.BASES + 1] = cache.addresses
            tables[:, fields.WINDOW] = [layer.window for layer in self.layers]
            tables[:, [fields.ROTARY, fields.COS, fields.SIN]] = rotations[[layer.rope for layer in self.layers]]
            self._known = LayerTables(tables, cache.addresses, ropes)
        return self._known

    def together(
        self, plan: ExactPlan, flow: Tensor, start: int, stop: int, taps: Mapping[int, Tensor]
    ) -> Tensor | None:
        """See `torch_tier.Operations`: not where the pass is too wide, or the model has layers that cannot."""
        if self._narrow is None or len(flow) > self._narrow.widest or start == stop:
            return None
        return self._narrow(plan.tables, flow, start, stop, plan.threads, taps)

    def goes_whole(self, rows: int) -> bool:
        """See `torch_tier.Operations`: not where the pass is too wide, or the model has steps that cannot."""
        return self._narrow is not None and self._narrow.outputs > 0 and rows <= self._narrow.widest

    def whole(self, plan: ExactPlan, flow: Tensor, start: int, taps: Mapping[int, Tensor]) -> Tensor:
        assert self._narrow is not None
        logits = flow.new_empty(len(flow), self._narrow.outputs)
        self._narrow(plan.tables, flow, start, len(self.layers), plan.threads, taps, logits)
        return logits

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


def _places(span: Span, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions and how many keys are in each token's list, `[batch, width]`, and the paths as the attention kernel
    wants them.
    """
    first = starts[:, None]
    slots = first + np.arange(span.offset, span.offset + span.width)
    places = slots if span.depths is None else first + span.depths.numpy()
    if span.ancestors is None:
        return places, slots + 1, _NO_PATHS
    ancestors = span.ancestors.numpy()
    paths = np.argsort(~ancestors, axis=2, kind="stable")  # the visible slots first, in their order
    return places, first + ancestors.sum(2), np.pad(paths, ((0, 0), (0, 0), (1, 0)))


def _threads(out: Tensor) -> int:
    return 1 if out.numel() < _ALONE else torch.get_num_threads()
