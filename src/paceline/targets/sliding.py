"""The KV cache of the fast tiers for models with windows: it drops what lies before all windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int
from torch import Tensor

from paceline.targets.cache import CacheShape, KVCache, addresses_of, keep_path, write_slots

if TYPE_CHECKING:
    from paceline.targets.span import Span

ROOM = 512 + 64  # slots after a window: for a piece of a prompt, and so that rows move seldom
REGION = 32  # tokens that may be taken back


def fitting_cache(
    shape: CacheShape, windows: Sequence[int], batch: int, capacity: int, zeros: Callable[..., Tensor]
) -> KVCache:
    """A cache for layers with these windows that takes the least memory.

    Args:
        zeros: makes a tensor of a size.
    """
    if any(windows) and max(windows) - 1 + ROOM < capacity:
        return SlidingCache.of(shape, windows, batch, capacity, zeros)
    store = zeros((shape.layers, 2, batch, shape.kv_heads, capacity, shape.head_dim))
    return KVCache(store, np.zeros(batch, dtype=np.int64))


class Recent:
    """Keys and values of the layers with windows, `[layers, 2, batch, kv_heads, size, head_dim]`: what a cache and the
    views of its rows share. It grows when a pass has more tokens than it has room for.
    """

    def __init__(self, store: Tensor) -> None:
        self.store, self.region = store, REGION

    def grow(self, size: int) -> None:
        before = self.store
        self.store = before.new_zeros(*before.shape[:4], size, before.shape[5])
        self.store[..., : before.shape[4], :] = before


class SlidingCache(KVCache):
    """Layers that see all keep all, in one tensor. Those with windows share another, in which each row keeps the end of
    its text: where a pass does not fit, that end moves to the front, in one copy for some hundred tokens. So nothing
    wraps around, slots keep their order, and attention reads both alike.

    Attributes:
        bases: int64 `[batch]`, the first slot of each row that layers with windows have.
    """

    forgets = True

    def __init__(
        self,
        whole: Tensor,
        recent: Recent,
        windows: Sequence[int],
        capacity: int,
        lengths: np.ndarray,
        bases: np.ndarray,
        rows: slice,
    ) -> None:
        self.lengths, self.bases, self._rows = lengths, bases, rows
        self._whole, self._recent, self._windows, self._capacity = whole, recent, windows, capacity
        self._tail = max(windows) - 1  # slots behind which no token looks back
        self._addressed: tuple[Tensor, np.ndarray] | None = None
        self._views: dict[tuple[int, int], SlidingCache] = {}
        counts = [0, 0]
        self._places = []  # of each layer: whether it has a window, and which of its tensor's layers it is
        for window in windows:
            self._places.append((bool(window), counts[bool(window)]))
            counts[bool(window)] += 1

    @classmethod
    def of(
        cls, shape: CacheShape, windows: Sequence[int], batch: int, capacity: int, zeros: Callable[..., Tensor]
    ) -> SlidingCache:
        """A cache of `batch` rows, each of up to `capacity` tokens.

        Args:
            windows: by layer, in tokens; 0: none.
        """
        near, kept = sum(map(bool, windows)), max(windows) - 1 + ROOM
        whole = zeros((shape.layers - near, 2, batch, shape.kv_heads, capacity, shape.head_dim))
        recent = Recent(zeros((near, 2, batch, shape.kv_heads, kept, shape.head_dim)))
        nothing = np.zeros(batch, dtype=np.int64)
        return cls(whole, recent, windows, capacity, nothing, nothing.copy(), slice(0, batch))

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def num_layers(self) -> int:
        return len(self._windows)

    @property
    def tensors(self) -> list[Tensor]:
        return [self._whole, self._recent.store]

    def clear(self) -> None:
        self.lengths[:] = self.bases[:] = 0

    def reserve(self, nodes: int) -> None:
        self._recent.region = max(self._recent.region, nodes)

    def rows(self, start: int, stop: int) -> KVCache:
        if (start, stop) == (0, self.batch):
            return self
        if (start, stop) not in self._views:
            rows = slice(self._rows.start + start, self._rows.start + stop)
            self._views[start, stop] = SlidingCache(
                self._whole,
                self._recent,
                self._windows,
                self._capacity,
                self.lengths[start:stop],
                self.bases[start:stop],
                rows,
            )
        return self._views[start, stop]

    @property
    def key(self) -> tuple[object, ...]:
        return self._whole.data_ptr(), self._recent.store.data_ptr(), self._rows.start, self.bases.tobytes()

    @property
    def addresses(self) -> Int[np.ndarray, "layers 5"]:
        if self._addressed is None or self._addressed[0] is not self._recent.store:
            kinds = (addresses_of(self._of_rows(False)), addresses_of(self._of_rows(True), self.bases))
            found = np.stack([kinds[near][place] for near, place in self._places])
            self._addressed = self._recent.store, found
        return self._addressed[1]

    def _of_rows(self, near: bool) -> Tensor:
        store = self._recent.store if near else self._whole
        return store[:, :, self._rows]

    def place(self, span: Span) -> None:
        """See KVCache; raises IndexError also where more was taken back than is kept."""
        super().place(span)
        new = span.offset + span.width
        bases = self.bases[: span.batch]
        bases[span.starts == 0] = 0  # rows that begin anew
        if ((bases > 0) & (bases > span.starts - self._tail)).any():
            raise IndexError("more tokens were taken back than the cache keeps")
        for row in np.flatnonzero(span.starts + new - bases > self._recent.store.shape[4]).tolist():
            self._slide(row, int(span.starts[row]), new)

    def _slide(self, row: int, start: int, new: int) -> None:
        """Move a row to the front, but for what no token from `start` on sees."""
        recent, base = self._recent, int(self.bases[row])
        first = max(base, start - self._tail - recent.region)
        if (needed := start + new - first) > recent.store.shape[4]:
            recent.grow(needed)
        kept = recent.store.shape[4] - (first - base)
        for slots in recent.store[:, :, self._rows.start + row] if kept > 0 else ():  # layer by layer: a small copy
            slots[:, :, :kept] = slots[:, :, first - base :].clone()
        self.bases[row] = first

    def write(self, layer: int, span: Span, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See KVCache; of layers with windows the views begin with their oldest slot, `bases` of each row."""
        near, place = self._places[layer]
        key_store, value_store = self._of_rows(near)[place]
        return write_slots(key_store, value_store, span.behind(self.bases) if near else span, keys, values)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        for row, path in enumerate(paths):
            start = int(self.lengths[row])
            keep_path(self._whole, self._rows.start + row, start, path)
            keep_path(self._recent.store, self._rows.start + row, start - int(self.bases[row]), path)
            self.lengths[row] += len(path)

    def move(self, source: int, target: int) -> None:
        used, base, first = int(self.lengths[source]), int(self.bases[source]), self._rows.start
        for store, count in ((self._whole, used), (self._recent.store, used - base)):
            store[:, :, first + target, :, :count] = store[:, :, first + source, :, :count]
        self.lengths[target], self.bases[target] = used, base
