"""What happens between the matrix products, by the kernels of this package: CPU, float32, bits that do not depend on
the width of the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from paceline.targets import attention as fields
from paceline.targets.attention import ATTEND_FIELDS, TILE, attend
from paceline.targets.kernels import add_norm, clamped_swiglu, gelu, gelu_tanh_gate, silu_gate
from paceline.targets.parts import CLAMPED

if TYPE_CHECKING:
    from paceline.targets.cache import KVCache
    from paceline.targets.fused import FusedLayer, Shape
    from paceline.targets.parts import Norm
    from paceline.targets.rope import RopeTables
    from paceline.targets.span import Span

_ALONE = 1 << 14  # elements below which waking the other threads costs more than it saves


class ExactPlan:
    """A span as the attention kernel reads it: its table, and the arrays the table points to."""

    def __init__(
        self, span: Span, cache: KVCache, shape: Shape, ropes: Sequence[RopeTables], context: int, threads: int
    ) -> None:
        for rope in ropes:
            rope.grow(cache.capacity)
        self.span, self.addresses, self.threads = span, cache.addresses, threads
        starts = np.ascontiguousarray(span.starts, dtype=np.int64)
        positions = span.positions.clamp(max=context - 1).contiguous().numpy()
        counts, paths = _visible(span, starts)
        longest = int(counts.max())
        scratch = torch.empty(threads * TILE * (shape.heads // shape.kv_heads) * longest)
        self._held = (starts, positions, counts, paths, scratch, [(rope.cos, rope.sin) for rope in ropes])
        #: By layers' `rope`: how many dimensions are rotated, and by which tables; the last, -1, is none.
        self.rotations = [[rope.size, *_addresses(rope.cos, rope.sin)] for rope in ropes] + [[0, 0, 0]]
        self.table = table = np.zeros(ATTEND_FIELDS, dtype=np.int64)
        table[fields.BATCH], table[fields.WIDTH], table[fields.OFFSET] = span.batch, span.width, span.offset
        table[fields.HEADS], table[fields.KV_HEADS], table[fields.HEAD_DIM] = (
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
        )
        table[fields.LONGEST], table[fields.SCRATCH] = longest, scratch.data_ptr()
        table[fields.SCORE_SCALE], table[fields.SCORE_CAP] = _bits(shape.score_scale), _bits(shape.score_cap)
        table[fields.NORM_WHOLE] = shape.norm_whole
        table[fields.STARTS], table[fields.POSITIONS] = starts.ctypes.data, positions.ctypes.data
        table[fields.COUNTS] = counts.ctypes.data
        table[fields.PATHS], table[fields.PATH_STRIDE] = paths.ctypes.data, paths.shape[-1] if paths.size > 1 else 0


class ExactOps:
    exact = True

    def __init__(self, shape: Shape, ropes: Sequence[RopeTables], context: int) -> None:
        self.shape, self.ropes, self.context = shape, ropes, context
        kernels = {"silu": silu_gate, "gelu_tanh": gelu_tanh_gate, CLAMPED: clamped_swiglu, "gelu": gelu}
        self._activation = kernels[shape.activation]
        self._numbers = [_bits(number) for number in shape.swiglu]

    def plan(self, span: Span, cache: KVCache) -> ExactPlan:
        return ExactPlan(span, cache, self.shape, self.ropes, self.context, torch.get_num_threads())

    def norm(self, hidden: Tensor, delta: Tensor | None, norm: Norm | None) -> Tensor:
        if norm is None:
            return hidden if delta is None else hidden.add_(delta)
        out = torch.empty_like(hidden)
        rows, size = hidden.shape
        table = [*_addresses(hidden, delta, norm.weight, norm.bias, out), rows, size, _bits(norm.eps)]
        add_norm(np.array(table), _threads(out))
        return out

    def attend(self, plan: ExactPlan, cache: KVCache, layer: FusedLayer, index: int, qkv: Tensor) -> Tensor:
        out = qkv.new_empty(qkv.shape[0], self.shape.heads * self.shape.head_dim)
        table = plan.table
        table[fields.QKV], table[fields.OUT] = qkv.data_ptr(), out.data_ptr()
        table[fields.KEYS : fields.BASES + 1] = plan.addresses[index]
        table[fields.WINDOW] = layer.window
        table[fields.SINKS] = _addresses(layer.sinks)[0]
        table[fields.ROTARY], table[fields.COS], table[fields.SIN] = plan.rotations[layer.rope]
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = _addresses(layer.query_norm.weight, layer.key_norm.weight)
            table[fields.QUERY_NORM], table[fields.KEY_NORM] = norms
            table[fields.HEAD_EPS] = _bits(layer.query_norm.eps)
        attend(table, plan.threads)
        return out

    def activate(self, up: Tensor) -> Tensor:
        rows, size = up.shape
        if self.shape.gated:
            size //= 2
        out = up.new_empty(rows, size)
        table = np.array([*_addresses(up, out), rows, size, *self._numbers])
        self._activation(table, _threads(out))
        return out


def _visible(span: Span, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many keys are in each token's list, `[batch, width]`, and the paths as the attention kernel wants them."""
    if span.ancestors is None:
        seen = starts[:, None] + np.arange(span.offset + 1, span.offset + span.width + 1)
        return seen, np.zeros(1, dtype=np.int64)
    ancestors = span.ancestors.numpy()
    paths = np.argsort(~ancestors, axis=2, kind="stable")  # the visible slots first, in their order
    return starts[:, None] + ancestors.sum(2), np.pad(paths, ((0, 0), (0, 0), (1, 0)))


def _addresses(*tensors: Tensor | None) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def _threads(out: Tensor) -> int:
    return 1 if out.numel() < _ALONE else torch.get_num_threads()
