"""The KV cache: writes, commits and moves, against plain copies."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import one_thread  # noqa: F401
from paceline.targets.cache import CacheShape, CacheWindow, KVCache
from paceline.targets.span import Span

SHAPE = CacheShape(layers=2, kv_heads=2, head_dim=3)


def filled(batch: int, capacity: int, lengths: list[int] | None = None) -> KVCache:
    """Every entry its own number."""
    cache = KVCache.allocate(SHAPE, batch, capacity, torch.float64, torch.device("cpu"))
    cache.store.copy_(torch.arange(cache.store.numel(), dtype=torch.float64).view_as(cache.store))
    cache.lengths[:] = lengths or [0] * batch
    return cache


def test_allocates_zeros() -> None:
    cache = KVCache.allocate(SHAPE, 3, 5, torch.float32, torch.device("cpu"))
    assert cache.store.shape == (2, 2, 3, 2, 5, 3)
    assert (cache.batch, cache.capacity) == (3, 5)
    assert not cache.store.any()
    assert not cache.lengths.any()


def test_rows_are_views() -> None:
    cache = filled(4, 5)
    view = cache.rows(1, 3)
    view.lengths[0] = 4
    view.store[:, :, 1] = -1
    assert cache.lengths.tolist() == [0, 4, 0, 0]
    assert (cache.store[:, :, 2] == -1).all()
    assert (cache.store[:, :, 3] >= 0).all()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=3), st.integers(1, 3), st.integers(0, 2))
def test_write(starts: list[int], width: int, offset: int) -> None:
    """At the span's slots and nowhere else; what comes back is the cache itself, without a copy."""
    cache = filled(len(starts), 10)
    before = cache.store.clone()
    span = Span(torch.zeros(len(starts), width, dtype=torch.long), np.array(starts), offset)
    keys, values = -torch.rand(2, len(starts), SHAPE.kv_heads, width, SHAPE.head_dim, dtype=torch.float64) - 1
    got = CacheWindow(cache, span).update(keys, values, 1)
    for part, new in enumerate((keys, values)):
        for row, start in enumerate(starts):
            at = slice(start + offset, start + offset + width)
            before[1, part, row, :, at] = new[row]
        assert got[part].shape == (len(starts), SHAPE.kv_heads, span.end, SHAPE.head_dim)
        assert got[part].data_ptr() == cache.store[1, part].data_ptr()
    assert torch.equal(cache.store, before)


@st.composite
def commits(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    paths = [[0, *sorted(draw(st.sets(st.integers(1, 6), max_size=4)))] for _ in lengths]
    return lengths, paths


@given(commits())
def test_commit(case: tuple[list[int], list[list[int]]]) -> None:
    """The nodes of the path become the next slots; what was committed before stays."""
    lengths, paths = case
    cache = filled(len(lengths), 12, lengths)
    before = cache.store.clone()
    cache.commit(paths)
    for row, (length, path) in enumerate(zip(lengths, paths, strict=True)):
        want = [*range(length), *(length + node for node in path)]
        assert cache.lengths[row] == len(want)
        assert torch.equal(cache.store[:, :, row, :, : len(want)], before[:, :, row][:, :, :, want])


def test_move() -> None:
    cache = filled(3, 6, [2, 0, 5])
    before = cache.store.clone()
    cache.move(2, 0)
    assert cache.lengths.tolist() == [5, 0, 5]
    assert torch.equal(cache.store[:, :, 0, :, :5], before[:, :, 2, :, :5])
    assert torch.equal(cache.store[:, :, 1:], before[:, :, 1:])


def test_window_tells_sizes() -> None:
    """What Hugging Face modules ask of `past_key_values`."""
    window = CacheWindow(filled(2, 8, [3, 1]), Span(torch.zeros(2, 2, dtype=torch.long), np.array([3, 1])))
    assert len(window) == SHAPE.layers
    assert window.get_seq_length() == 3
    assert window.get_mask_sizes(2, 0) == (5, 0)
