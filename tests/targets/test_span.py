"""Masks and positions, against their definition slot by slot."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import one_thread  # noqa: F401
from paceline.targets.span import Span


def visible(span: Span) -> list[list[set[int]]]:
    """By row and node, the slots that the span's mask lets through."""
    mask = span.mask(torch.float64, explicit=True)
    assert mask is not None
    assert mask.shape == (span.batch, 1, span.width, span.end)
    assert set(mask.unique().tolist()) <= {0.0, torch.finfo(torch.float64).min}
    return [[set(node.nonzero()[:, 0].tolist()) for node in row[0] == 0] for row in mask]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 5), st.integers(0, 3))
def test_chain(starts: list[int], width: int, offset: int) -> None:
    span = Span(torch.zeros(len(starts), width, dtype=torch.long), np.array(starts), offset)
    assert span.end == max(starts) + offset + width
    for row, start in enumerate(starts):
        for node in range(width):
            slot = start + offset + node
            assert span.slots[row, node] == span.positions[row, node] == slot
            assert visible(span)[row][node] == set(range(slot + 1))


@st.composite
def regions(draw: st.DrawFn) -> Span:
    """A tree over a draft region whose first `offset` slots a drafter filled before."""
    starts = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    offset, width = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    bits = st.lists(st.booleans(), min_size=offset + width, max_size=offset + width)
    seen = torch.tensor([[draw(bits) for _ in range(width)] for _ in starts])
    depths = torch.tensor([[draw(st.integers(0, 4)) for _ in range(width)] for _ in starts])
    return Span(torch.zeros_like(depths), np.array(starts), offset, depths, seen)


@given(regions())
def test_tree(span: Span) -> None:
    assert span.depths is not None
    assert span.ancestors is not None
    for row, start in enumerate(span.starts):
        for node in range(span.width):
            inside = {int(start) + slot for slot in span.ancestors[row, node].nonzero()[:, 0].tolist()}
            assert visible(span)[row][node] == set(range(start)) | inside
            assert span.slots[row, node] == start + span.offset + node
            assert span.positions[row, node] == start + span.depths[row, node]


def test_no_mask_where_attention_needs_none() -> None:
    one, three = torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long)
    assert Span(one, np.array([4, 4])).mask(torch.float32) is None  # sees everything
    assert Span(one, np.array([4, 4]), offset=2).mask(torch.float32) is None
    assert Span(three, np.array([0, 0])).mask(torch.float32) is None  # plain causal
    assert Span(one, np.array([4, 3])).mask(torch.float32) is not None
    assert Span(three, np.array([1, 1])).mask(torch.float32) is not None
    assert Span(three, np.array([0, 0]), offset=1).mask(torch.float32) is not None
    assert Span(three, np.array([0, 0])).mask(torch.float32, explicit=True) is not None


def test_mask_is_built_once_a_type() -> None:
    span = Span(torch.zeros(1, 3, dtype=torch.long), np.array([2]))
    assert span.mask(torch.float32) is span.mask(torch.float32)
    half = span.mask(torch.bfloat16)
    assert half is not None
    assert half.dtype == torch.bfloat16
    assert torch.isfinite(half).all()
