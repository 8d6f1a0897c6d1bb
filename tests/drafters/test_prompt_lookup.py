"""Prompt lookup against a search of the whole sequence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafters.ngram_lookup import NgramLookup
from paceline.drafters.prompt_lookup import PromptLookup
from paceline.drafters.suffix_automaton import SuffixLookup
from paceline.drafting.ngram_index import NgramIndex
from paceline.errors import OptionError
from paceline.policies.fixed import Fixed

ids_lists = st.lists(st.integers(0, 3), min_size=1, max_size=25)


def found(ids: list[int], longest: int, shortest: int) -> list[int]:
    """Ends of earlier occurrences of the longest suffix that has any, latest first."""
    for n in range(min(longest, len(ids) - 1), shortest - 1, -1):
        ends = [end for end in range(n, len(ids)) if ids[end - n : end] == ids[-n:]]
        if ends:
            return ends[::-1]
    return []


@given(ids_lists, st.lists(st.integers(1, 6), max_size=6), st.integers(1, 4), st.integers(1, 3))
def test_index_is_a_search(ids: list[int], steps: list[int], longest: int, most: int) -> None:
    """However the sequence grew."""
    index = NgramIndex(longest)
    length = 1
    for step in [*steps, len(ids)]:
        length = min(length + step, len(ids))
        index.extend(ids[:length])
        for shortest in range(1, longest + 1):
            matched, ends = index.matches(ids[:length], shortest, most)
            assert ends == found(ids[:length], longest, shortest)[:most]
            assert all(ids[end - matched : end] == ids[length - matched : length] for end in ends)


def row(ids: list[int], room: int = 9, k: int = 4) -> SimpleNamespace:
    return SimpleNamespace(ids=ids, room=room, policy=Fixed(k=k), state=None, sampling=False, plain=True)


def lookup(ids: list[int], room: int = 9, k: int = 4, **options: int):
    drafter = PromptLookup(None, **{"budget": 32, **options})
    made = row(ids, room, k)
    drafter.begin(made, {})
    [tree] = drafter.draft([made])
    return tree


def test_copies_what_followed() -> None:
    tree = lookup([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3])
    assert tree.tokens == [3, 4, 5, 6, 7]
    assert tree.is_chain
    assert not tree.sampled
    assert set(tree.sources[1:]) == {"prompt-lookup"}


def test_longest_and_latest_match_first() -> None:
    assert lookup([9, 2, 5, 1, 2, 6, 7, 2, 8, 8, 1, 2]).tokens[1] == 6  # (1, 2), not the later (2,)
    assert lookup([1, 2, 5, 1, 2, 6, 1, 2]).tokens[1] == 6  # the later of the two


def test_length_is_the_policys_and_the_rooms() -> None:
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    assert lookup(ids, k=2).drafted == 2
    assert lookup(ids, room=3).drafted == 3
    assert lookup(ids, k=0).drafted == lookup(ids, room=0).drafted == 0


@pytest.mark.parametrize("period", [1, 3, 4])
def test_what_repeats_is_drafted_to_repeat_further(period: int) -> None:
    """Beyond the end of the text, where the earlier place leads to."""
    cycle = list(range(1, period + 1))
    ids = [9, *(cycle * 20)[: 2 * period + 1]]
    following = (cycle * 20)[2 * period + 1 : 2 * period + 11]
    assert NgramLookup(3, 1, 1).propose(ids, NgramLookup(3, 1, 1).begin(ids), 10, 32).tokens == following
    assert SuffixLookup(1).propose(ids, SuffixLookup(1).begin(ids), 10, 32).tokens == following


def test_branches() -> None:
    ids = [1, 2, 5, 0, 1, 2, 6, 0, 1, 2, 6, 3, 1, 2]
    tree = lookup(ids, k=2, branches=3)
    assert [[tree.tokens[n] for n in tree.path(leaf)[1:]] for leaf in range(1, len(tree))] == [
        [6],
        [6, 3],
        [6, 0],
        [5],
        [5, 0],
    ]
    assert tree.drafted <= PromptLookup(None, branches=3, budget=32).max_nodes(2)


def test_no_match() -> None:
    assert lookup([1, 2, 3]).drafted == 0
    assert lookup([1]).drafted == 0
    assert lookup([2, 1, 2], shortest=2).drafted == 0


@given(ids_lists, st.integers(0, 6), st.integers(0, 6), st.integers(1, 3))
def test_never_too_long(ids: list[int], room: int, k: int, branches: int) -> None:
    tree = lookup(ids, room, k, branches=branches)
    assert tree.depth <= min(room, k)
    assert tree.drafted <= PromptLookup(None, branches=branches, budget=32).max_nodes(k)


@pytest.mark.parametrize(
    "bad", [{"ngram": 0}, {"shortest": 0}, {"ngram": 2, "shortest": 3}, {"branches": 0}, {"budget": 0}]
)
def test_out_of_range(bad: dict[str, int]) -> None:
    with pytest.raises(OptionError, match=r"prompt-lookup|budget"):
        PromptLookup(None, **{"budget": 8, **bad})
