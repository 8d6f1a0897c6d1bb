"""The KV cache: one preallocated tensor, written in place, one length per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache

if TYPE_CHECKING:
    from paceline.targets.span import Span


class CacheShape(NamedTuple):
    layers: int
    kv_heads: int
    head_dim: int


class KVCache:
    """Keys and values of `batch` requests.

    Row `b` holds its committed tokens in slots `0 .. lengths[b]-1` (slot = position); the slots after them are the
    draft region that a verification pass writes and `commit` keeps a path of. `lengths` is a NumPy array, so that the
    views of `rows` share it as it shares the storage.

    `forgets` says that it drops the beginnings of texts, in some layers.
    """

    forgets = False

    def __init__(self, store: Float[Tensor, "layers 2 batch kv_heads capacity head_dim"], lengths: np.ndarray) -> None:
        self.store = store
        self.lengths = lengths
        self._first: dict[int, KVCache] = {}  # views of the first rows, by their number
        self._addresses: np.ndarray | None = None
        self._layers = [layer.unbind() for layer in store.unbind()]  # views made once: they cost more than a write

    @classmethod
    def allocate(
        cls, shape: CacheShape, batch: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        size = (shape.layers, 2, batch, shape.kv_heads, capacity, shape.head_dim)
        # Zeros, not empty: a slot that is masked out still enters 0 * value, and 0 * nan is nan.
        return cls(torch.zeros(size, dtype=dtype, device=device), np.zeros(batch, dtype=np.int64))

    @property
    def batch(self) -> int:
        return self.store.shape[2]

    @property
    def capacity(self) -> int:
        return self.store.shape[4]

    def clear(self) -> None:
        """Forget all tokens of all rows."""
        self.lengths[:] = 0

    @property
    def tensors(self) -> list[Tensor]:
        """All that it keeps of tokens."""
        return [self.store]

    def reserve(self, nodes: int) -> None:
        """Make room after each row's committed tokens for so many more, which may be taken back."""

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for views of the same slots."""
        return self.store.data_ptr(), self.store.stride()

    @property
    def addresses(self) -> Int[np.ndarray, "layers 5"]:
        """By layer: where keys and values begin, how many numbers lie between rows and between heads, and where the
        first slots of rows stand (int64; 0: all begin with slot 0). For kernels, after `place`.
        """
        if self._addresses is None:
            self._addresses = addresses_of(self.store)
        return self._addresses

    def place(self, span: Span) -> None:
        """Make room for a span's tokens, before its layers run. Raises IndexError for one beyond the capacity."""
        if span.end > self.capacity:
            raise IndexError(f"a pass over slots up to {span.end} exceeds the cache's capacity of {self.capacity}")

    @property
    def num_layers(self) -> int:
        return self.store.shape[0]

    def rows(self, start: int, stop: int) -> KVCache:
        """A view of the rows `start .. stop-1`."""
        if (start, stop) == (0, self.batch):
            return self
        if start == 0:  # a round's, asked for again and again
            if stop not in self._first:
                self._first[stop] = KVCache(self.store[:, :, :stop], self.lengths[:stop])
            return self._first[stop]
        return KVCache(self.store[:, :, start:stop], self.lengths[start:stop])

    def write(self, layer: int, span: Span, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store `[batch, kv_heads, width, head_dim]` at the span's slots; returns views of the slots `0 .. end-1`."""
        key_store, value_store = self._layers[layer]
        return write_slots(key_store, value_store, span, keys, values)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep, of each row's draft region, the nodes of `paths[row]` (ascending), as the row's next tokens."""
        for row, path in enumerate(paths):
            keep_path(self.store, row, int(self.lengths[row]), path)
            self.lengths[row] += len(path)

    def move(self, source: int, target: int) -> None:
        """Copy row `source` over row `target` (a request that ended makes room for the last one)."""
        used = int(self.lengths[source])
        self.store[:, :, target, :, :used] = self.store[:, :, source, :, :used]
        self.lengths[target] = used


def write_slots(
    key_store: Tensor, value_store: Tensor, span: Span, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Store `[batch, kv_heads, width, head_dim]` at the span's slots; returns views of the slots `0 .. end-1`."""
    if span.batch == 1:
        at = span.end - span.width
        key_store.narrow(2, at, span.width).copy_(keys)
        value_store.narrow(2, at, span.width).copy_(values)
    else:
        row = torch.arange(span.batch, device=keys.device)[:, None]
        key_store[row, :, span.slots] = keys.transpose(1, 2)
        value_store[row, :, span.slots] = values.transpose(1, 2)
    return key_store.narrow(2, 0, span.end), value_store.narrow(2, 0, span.end)


def keep_path(store: Tensor, row: int, start: int, path: Sequence[int]) -> None:
    """Move the nodes of `path` to the front of the draft region that begins at slot `start`."""
    kept = len(path)
    moved = next((i for i, node in enumerate(path) if node != i), kept)  # what is in place stays
    if moved < kept:
        source = torch.tensor(path[moved:], device=store.device) + start
        slots = store[:, :, row]
        slots[:, :, :, start + moved : start + kept] = slots.index_select(3, source)


def addresses_of(
    store: Float[Tensor, "layers 2 batch kv_heads slots head_dim"], bases: np.ndarray | None = None
) -> Int[np.ndarray, "layers 5"]:
    """See `KVCache.addresses`."""
    layer, value, row, head = store.stride()[:4]
    first = 0 if bases is None else bases.ctypes.data
    keys = [store.data_ptr() + store.itemsize * layer * index for index in range(len(store))]
    table = [(at, at + store.itemsize * value, row, head, first) for at in keys]
    return np.array(table, dtype=np.int64).reshape(-1, 5)


class CacheWindow(Cache):
    """One pass's view of a KVCache, in the form Hugging Face modules expect as `past_key_values`."""

    def __init__(self, cache: KVCache, span: Span) -> None:
        super().__init__(layers=[])
        self.cache, self.span = cache, span

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return self.cache.write(layer_idx, self.span, key_states, value_states)

    def get_seq_length(self, layer_idx: int | None = None) -> int | Tensor:  # type: ignore[override]
        """What is added to 0, 1, ... for positions; in a layer that adds it itself, for each node of a tree its own."""
        if layer_idx is None or self.span.depths is None or self.span.batch > 1:
            return self.span.seen
        return self.span.positions[0] - torch.arange(self.span.width, device=self.span.ids.device)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.span.end, 0

    def __len__(self) -> int:
        return self.cache.num_layers
