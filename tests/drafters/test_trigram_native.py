"""The search in the native tier's library gives what numba's does, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.ngrams import discounted
from drafters.test_trigram_search import SEARCHES, plan_of
from paceline.drafters.trigram.kernels import kernels
from paceline.drafters.trigram.lookup import TrigramLookup
from paceline.drafters.trigram.matrix import token_bits
from paceline.drafters.trigram.overlay import Overlay
from paceline.drafters.trigram.structures import Rule
from paceline.drafting.lookup import Candidates
from paceline.targets.native import available

pytestmark = pytest.mark.skipif(not available(), reason="needs a C++ compiler with OpenMP")

SMALL = 12  # tokens of a vocabulary
tokens = st.integers(0, SMALL - 1)
texts = st.lists(tokens, min_size=1, max_size=80)


def drafts_of(
    ids: list[int], corpus: list[int], rounds: list[list[int]], search: str, native: bool, order: int, vocab: int
) -> tuple[list[Candidates], list[int]]:
    """Of a text that grows, as trees and as chains; and the state of the random numbers."""
    literal = search == "literal"
    rule = Rule(order, token_bits(vocab), literal, 0.3, 0.9, 1.0)
    options = {"adapt": "prompt", "window": 16, "shared": 0.0 if literal else 7.0, "seed": 3}
    lookup = TrigramLookup(
        discounted([corpus], order, vocab), rule, plan_of(**SEARCHES[search]), **options, native=native
    )
    text, drafts, memory = list(ids), list[Candidates](), lookup.begin(ids)
    for more in [[], *rounds]:
        text += more
        lookup.observe(text, memory)
        drafts += [lookup.propose(text, memory, 5, 40, least) for least in (0.0, 0.05)]
    lookup.to_chains()
    drafts += lookup.propose_all([text, ids[:1]], [memory, lookup.begin(ids[:1])], 5, 4)
    return drafts, memory.random.tolist()


@given(ids=texts, corpus=texts, rounds=st.lists(texts, max_size=3), search=st.sampled_from(list(SEARCHES)))
@settings(max_examples=60, deadline=None)
def test_same_drafts(ids: list[int], corpus: list[int], rounds: list[list[int]], search: str) -> None:
    mine, numbas = (drafts_of(ids, corpus, rounds, search, native, 3, SMALL) for native in (True, False))
    assert mine == numbas


@given(ids=texts, corpus=texts, search=st.sampled_from(list(SEARCHES)), order=st.integers(2, 4))
@settings(max_examples=30, deadline=None)
def test_any_width(ids: list[int], corpus: list[int], search: str, order: int) -> None:
    """Keys of an order 4 matrix in 16, 32 and 64 bits, token ids in 16 and 32. (numba compiles seconds for each.)"""
    small, *larger = (drafts_of(ids, corpus, [ids], search, True, order, vocab) for vocab in (SMALL, 300, 70_000))
    assert larger == [small, small]


@given(rounds=st.lists(texts, min_size=1, max_size=6), half_life=st.sampled_from([float("inf"), 3.0]))
@settings(max_examples=30, deadline=None)
def test_same_counts(rounds: list[list[int]], half_life: float) -> None:
    ids, overlays = list[int](), [Overlay(3, half_life=half_life, room=4, compiled=kernels(n)) for n in (False, True)]
    for more in rounds:
        ids += more
        for overlay in overlays:
            overlay.learn(ids, len(ids) - len(more))
    one, other = (overlay.counts for overlay in overlays)
    assert one.used.tolist() == other.used.tolist()
    used = one.used[1]
    for mine, theirs in ((one.slots, other.slots), (one.entries[:used], other.entries[:used])):
        for field in mine.dtype.names or ():
            assert np.array_equal(mine[field], theirs[field]), field
