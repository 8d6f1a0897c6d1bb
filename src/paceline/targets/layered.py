"""The KV cache of models whose layers differ: in what they keep of a token, or in how many tokens they keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.targets.cache import KVCache
from paceline.targets.reach import Reach, ring_mask, tail_mask

if TYPE_CHECKING:
    from paceline.targets.span import Span

REGION = 32  # nodes of the draft region that a ring has room for, and the steps in which it grows


class LayerShape(NamedTuple):
    """What one layer keeps of a token, and how long."""

    reach: Reach
    keys: tuple[int, int]  # heads, numbers a head
    values: tuple[int, int]


Layout = Mapping[int, LayerShape]  # by layer; those that keep nothing are left out


class Rings:
    """Keys and values by layer, `[batch, heads, size, head_dim]` each: what a cache and the views of its rows share.

    A layer that sees all has one slot for each position. One with a window of `w` has `w - 1 + region` slots, used in
    turn: position `p` lies in slot `p % size`. A draft region of at most `region` nodes overwrites only what none of
    its nodes sees, and what rejected nodes leave behind is out of reach before its slot is taken for a position.
    """

    def __init__(self, layout: Layout, batch: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout, self.batch, self.capacity = layout, batch, capacity
        self.dtype, self.device = dtype, device
        self.region = REGION
        self.layers = {index: self._zeros(shape) for index, shape in layout.items()}

    def size(self, reach: Reach) -> int:
        return self.capacity if reach.window is None else min(self.capacity, reach.window - 1 + self.region)

    def reserve(self, nodes: int, lengths: np.ndarray) -> None:
        """Room for draft regions of so many nodes."""
        if nodes <= self.region:
            return
        before, self.region = self.region, -(-nodes // REGION) * REGION
        for index, shape in self.layout.items():
            old, window = self.layers[index], shape.reach.window
            size = old[0].shape[2]
            if window is None or size == self.capacity:
                continue
            self.layers[index] = self._zeros(shape)
            for row, length in enumerate(lengths.tolist()):
                kept = torch.arange(max(0, length - window + 1), length + before, device=self.device)
                for source, target in zip(old, self.layers[index], strict=True):
                    target[row][:, kept % target.shape[2]] = source[row][:, kept % size]

    def _zeros(self, shape: LayerShape) -> tuple[Tensor, Tensor]:
        size = self.size(shape.reach)
        keys, values = (  # zeros, not empty: 0 * nan is nan, also where a mask hides it
            torch.zeros(self.batch, heads, size, dim, dtype=self.dtype, device=self.device)
            for heads, dim in (shape.keys, shape.values)
        )
        return keys, values


class LayeredCache(KVCache):
    """Keys and values in tensors of each layer's own; those of layers with windows do not grow with the text.

    Rows, lengths and commits are those of a KVCache, whose one tensor (`store`) it does not have.
    """

    forgets = True

    def __init__(self, rings: Rings, lengths: np.ndarray, first: int = 0, owner: LayeredCache | None = None) -> None:
        self.lengths = lengths
        self._rings, self.first_row = rings, first
        self._owner = owner or self

    @classmethod
    def of(cls, layout: Layout, batch: int, capacity: int, dtype: torch.dtype, device: torch.device) -> LayeredCache:
        """A cache of `batch` rows, each of up to `capacity` tokens, for layers by index."""
        return cls(Rings(layout, batch, capacity, dtype, device), np.zeros(batch, dtype=np.int64))

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        return self._rings.capacity

    @property
    def tensors(self) -> list[Tensor]:
        return [part for layer in self._rings.layers.values() for part in layer]

    @property
    def num_layers(self) -> int:
        return max(self._rings.layout, default=-1) + 1

    def rows(self, start: int, stop: int) -> LayeredCache:
        if (start, stop) == (0, self.batch):
            return self
        return LayeredCache(self._rings, self.lengths[start:stop], self.first_row + start, self._owner)

    def reserve(self, nodes: int) -> None:
        self._rings.reserve(nodes, self._owner.lengths)

    def masks(self, span: Span, dtype: torch.dtype) -> dict[str, Tensor]:
        """The additive attention mask of each kind of layer, by its name. Once a span, and before its layers run."""
        if span.end > self._rings.capacity:
            raise IndexError(f"a pass up to slot {span.end} over a cache of {self._rings.capacity}")
        if not span.final:
            self.reserve(span.offset + span.width)
        key = (self._rings, self._rings.region, dtype)
        if key not in span.memo:
            reaches = {shape.reach for shape in self._rings.layout.values()}
            span.memo[key] = {reach.name: self._mask(reach, span, dtype) for reach in reaches}
        masks: dict[str, Tensor] = span.memo[key]
        return masks

    def _mask(self, reach: Reach, span: Span, dtype: torch.dtype) -> Tensor:
        if reach.window is None:
            mask = span.mask(dtype, explicit=True)
            assert mask is not None
            return mask
        if self._overflows(span, reach):
            return tail_mask(span, reach, self._tail(span, reach), dtype)
        return ring_mask(span, reach, self._rings.size(reach), dtype)

    def _overflows(self, span: Span, reach: Reach) -> bool:
        """Whether a piece of a prompt has more tokens than the ring's draft region."""
        return self._rings.size(reach) < self._rings.capacity and span.offset + span.width > self._rings.region

    def _tail(self, span: Span, reach: Reach) -> int:
        """Committed tokens that a piece of a prompt may see."""
        assert reach.window is not None
        return min(int(span.starts[0]), reach.window - 1)

    def write(self, layer: int, span: Span, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store `[batch, heads, width, head_dim]` at the span's slots; returns what the layer's mask is over."""
        reach = self._rings.layout[layer].reach
        rows = slice(self.first_row, self.first_row + span.batch)
        stores = [store[rows] for store in self._rings.layers[layer]]
        size, new = stores[0].shape[2], (keys, values)
        if self._overflows(span, reach):
            start, tail = int(span.starts[0]), self._tail(span, reach)
            before = torch.arange(start - tail, start, device=keys.device) % size
            seen = [torch.cat([store[:, :, before], part], 2) for store, part in zip(stores, new, strict=True)]
            last = torch.arange(max(start, span.end - size), span.end, device=keys.device)
            for store, part in zip(stores, new, strict=True):
                store[:, :, last % size] = part[:, :, last - start]
            return seen[0], seen[1]
        at = (span.end - span.width) % size
        for store, part in zip(stores, new, strict=True):
            if span.batch == 1 and at + span.width <= size:
                store.narrow(2, at, span.width).copy_(part)
            else:
                row = torch.arange(span.batch, device=keys.device)[:, None]
                store[row, :, span.slots % size] = part.transpose(1, 2)
        used = min(span.end, size)
        return stores[0].narrow(2, 0, used), stores[1].narrow(2, 0, used)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        for row, path in enumerate(paths):
            start, kept = int(self.lengths[row]), len(path)
            moved = next((i for i, node in enumerate(path) if node != i), kept)
            if moved < kept:
                source = torch.tensor(path[moved:], device=self._rings.device) + start
                target = torch.arange(moved, kept, device=self._rings.device) + start
                for layer in self._rings.layers.values():
                    for store in layer:
                        slots, size = store[self.first_row + row], store.shape[2]
                        slots[:, target % size] = slots[:, source % size]
            self.lengths[row] += kept

    def move(self, source: int, target: int) -> None:
        used = int(self.lengths[source])
        for layer in self._rings.layers.values():
            for store in layer:
                store[self.first_row + target, :, :used] = store[self.first_row + source, :, :used]
        self.lengths[target] = used
