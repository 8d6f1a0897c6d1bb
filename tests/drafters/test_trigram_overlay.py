"""The adaptive layer against Algorithm 2 on a dictionary, and its decay."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.ngrams import Rows, counts_of, following, matrix_of, ngrams_of
from paceline.drafters.trigram.overlay import Overlay
from paceline.drafters.trigram.structures import CONTEXTS, ENTRIES

tokens = st.integers(0, 7)


def adjust_3gram(matrix: Rows, tokens: list[int], max_length: int, increment: float, max_prob: float) -> None:
    """ADED's Algorithm 2, line by line."""
    sub_tokens = tokens[max(0, len(tokens) - max_length) :]
    for i in range(2, len(sub_tokens)):
        row = matrix.setdefault((sub_tokens[i - 2], sub_tokens[i - 1]), {})
        token = sub_tokens[i]
        row[token] = min(row[token] + increment, max_prob) if token in row else increment


@given(
    rounds=st.lists(st.lists(tokens, min_size=1, max_size=5), min_size=1, max_size=12),
    window=st.integers(1, 20),
    increment=st.sampled_from([0.05, 0.3, 0.7]),
    max_prob=st.sampled_from([0.7, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_algorithm_2(rounds: list[list[int]], window: int, increment: float, max_prob: float) -> None:
    base: Rows = {(1, 2): {3: 0.5, 4: 0.25}, (2, 3): {3: 0.875}, (6, 6): {1: 1.0}}
    matrix = matrix_of(base, 3, 8)
    stored = following(ngrams_of(Overlay(3, shortest=3), matrix, literal=True), (1, 2))
    assert stored == pytest.approx(base[1, 2], rel=0.015)

    reference = {context: following(ngrams_of(Overlay(3), matrix, literal=True), context) for context in base}
    overlay, ids = Overlay(3, shortest=3, room=4), list[int]()
    for new in rounds:
        ids += new
        overlay.learn(ids, len(ids) - window + 2)
        adjust_3gram(reference, ids, window, increment, max_prob)
    ngrams = ngrams_of(overlay, matrix, literal=True, increment=increment, max_prob=max_prob)
    for first in range(8):
        for second in range(8):
            assert following(ngrams, (first, second)) == pytest.approx(reference.get((first, second), {}))


@given(texts=st.lists(st.lists(tokens, min_size=1, max_size=40), min_size=1, max_size=5), order=st.integers(2, 4))
@settings(max_examples=40, deadline=None)
def test_counts_piece_by_piece(texts: list[list[int]], order: int) -> None:
    """Learning a growing sequence bit by bit counts every n-gram of every order once."""
    whole = [token for text in texts for token in text]
    overlay, ids = Overlay(order, room=1), list[int]()
    for text in texts:
        ids += text
        overlay.learn(ids, len(ids) - len(text))
    rows = counts_of([whole], order)
    assert overlay.counts.used[CONTEXTS] == len(rows)
    assert overlay.counts.used[ENTRIES] == sum(map(len, rows.values()))
    at_once = Overlay(order)
    at_once.learn(whole, 0)
    one, other = ngrams_of(overlay), ngrams_of(at_once)
    for context in rows:
        assert following(one, context) == pytest.approx(following(other, context))


def test_nothing_new() -> None:
    overlay = Overlay(3)
    overlay.learn([1, 2, 3], 3)
    overlay.learn([], 0)
    assert overlay.counts.used[ENTRIES] == 0


def test_decay() -> None:
    """A count halves every `half_life` tokens, and the forgotten makes room for the new."""
    overlay = Overlay(2, half_life=10, room=8)
    overlay.learn([1, 2], 0)
    before = overlay.counts.slots["total"].sum() * overlay.scale
    overlay.learn([3] * 10, 0)
    row = overlay.counts.slots[(overlay.counts.slots["total"] > 0) & (overlay.counts.slots["kinds"] == 1)]
    assert before == pytest.approx(2**-0.2)
    assert sorted(row["total"] * overlay.scale)[0] == pytest.approx(2**-1.2)
    for start in range(0, 2000, 5):
        overlay.learn([start % 250, (start + 7) % 250, (start + 9) % 250], 0)
    assert len(overlay.counts.entries) < 200, "faded counts were kept"
    assert overlay.scale > 2**-33
