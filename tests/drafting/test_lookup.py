"""Sources of drafts that need token ids only: what they import, their paths, and many texts at once."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafters.suffix_automaton import SuffixLookup
from paceline.drafters.trigram.drafter import Trigram
from paceline.drafting.lookup import Candidates, DraftSource, MergedLookup, chain, united
from paceline.drafting.tree import TokenTree

TARGET = SimpleNamespace(tier="none", device=torch.device("cpu"), vocab_size=64, tokenizer=None, name="none")


@st.composite
def trees(draw: st.DrawFn) -> Candidates:
    """Without a token twice behind the same parent, and with scores that fall along each path."""
    found = Candidates([], [], [], [])
    for node in range(draw(st.integers(0, 8))):
        parent, token = draw(st.integers(0, node)), draw(st.integers(0, 3))
        if (parent, token) not in zip(found.parents, found.tokens, strict=True) and parent <= len(found.tokens):
            above = found.scores[parent - 1] if parent else 1.0
            found.add(token, parent, above * draw(st.sampled_from([0.25, 0.5, 1.0])), "x")
    return found


def as_tree(found: Candidates) -> TokenTree:
    tree = TokenTree.root(9)
    for token, parent, score, source in zip(*found, strict=True):
        tree.add(token, parent, source, score=score)
    return tree


def test_neither_torch_nor_an_engine() -> None:
    rooms = "drafting.lookup", "drafters.suffix_automaton", "drafters.ngram_lookup", "drafters.trigram.lookup"
    names = ", ".join(f"paceline.{room}" for room in (*rooms, "drafters.rest.search"))
    code = f"import sys, {names}; print({{'torch', 'transformers', 'paceline.decoding.engine'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@given(trees())
def test_best_path_is_the_trees(found: Candidates) -> None:
    expected = as_tree(found).best_chain().tokens[1:]
    assert [found.tokens[node - 1] for node in found.best_path()] == expected


@given(trees(), trees())
def test_united_has_all_paths_once(one: Candidates, other: Candidates) -> None:
    """With the better of two scores, from whoever gave it, and nothing of the parts is changed."""

    def paths(found: Candidates) -> dict[tuple[int, ...], float]:
        nodes = range(1, len(found.tokens) + 1)
        keys = [tuple(found.tokens[above - 1] for above in found.path(node)) for node in nodes]
        assert len(set(keys)) == len(keys)
        return dict(zip(keys, found.scores, strict=True))

    mine, theirs = paths(one), paths(other)
    expected = {key: max(mine.get(key, 0.0), theirs.get(key, 0.0)) for key in mine | theirs}
    assert paths(united([one, other])) == expected
    assert paths(one) == mine


@given(*[st.lists(st.integers(0, 2), max_size=5)] * 2)
def test_united_chains_as_trees(one: list[int], other: list[int]) -> None:
    """Of chains alone they are found a shorter way; with a third part, that adds nothing, as of all trees."""
    first = chain(one, [0.9 / (at + 1) for at in range(len(one))], "a")
    second = chain(other, [0.8 / (at + 0.5) for at in range(len(other))], "b")
    assert united([first, second]) == united([first, second, first])


def test_united_sources() -> None:
    found = united([chain([1, 2], [0.5, 0.2], "a"), chain([1, 2], [0.5, 0.4], "b")])
    assert (found.scores, found.sources) == ([0.5, 0.4], ["a", "b"])


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=30), min_size=1, max_size=4), st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_many_texts_at_once(texts: list[list[int]], depth: int) -> None:
    """As one by one; and a trigram chain is the likeliest token again and again."""
    source = Trigram(TARGET, matrix="none", shared=50).lookup  # type: ignore[arg-type]
    trees = [source.propose(text, source.begin(text), depth, 32) for text in texts]
    for lookup in (source, MergedLookup([SuffixLookup(1), source])):
        for chains in (False, True):
            if chains:
                lookup.to_chains()
            memories = [lookup.begin(text) for text in texts]
            at_once = lookup.propose_all(texts, memories, depth, 32)
            assert at_once == [lookup.propose(text, lookup.begin(text), depth, 32) for text in texts]
    for text, tree in zip(texts, trees, strict=True):
        (drafted,) = source.propose_all([text], [source.begin(text)], depth, 32)
        first = [score for parent, score in zip(tree.parents, tree.scores, strict=True) if parent == 0]
        assert drafted.scores[:1] == pytest.approx([max(first)] if first else [], rel=1e-5)
        assert drafted.scores == sorted(drafted.scores, reverse=True)


def test_nothing_is_proposed_by_nobody() -> None:
    lookup = DraftSource()
    assert lookup.begin([1]) is None
    lookup.observe([1, 2], None)
    lookup.to_chains()
    with pytest.raises(NotImplementedError):
        lookup.propose([1], None, 1, 1)
