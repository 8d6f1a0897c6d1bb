"""Token trees and the verification span made of them, against their definitions."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import one_thread  # noqa: F401
from paceline.drafting.tree import TokenTree, tree_span

CPU = torch.device("cpu")


@st.composite
def trees(draw: st.DrawFn, most: int = 9) -> TokenTree:
    """Any shape, over few tokens, so that siblings repeat them."""
    tree = TokenTree.root(draw(st.integers(0, 3)))
    for node in range(draw(st.integers(0, most))):
        q = torch.ones(4) / 4 if draw(st.booleans()) else None
        assert tree.add(draw(st.integers(0, 3)), draw(st.integers(0, node)), "x", q) == node + 1
    return tree


def ancestors(tree: TokenTree, node: int) -> set[int]:
    return {node} | (ancestors(tree, tree.parents[node]) if node else set())


@given(trees())
def test_invariants(tree: TokenTree) -> None:
    assert len(tree) == len(tree.tokens) == len(tree.parents) == len(tree.q) == len(tree.sources) == len(tree.depths)
    assert tree.drafted == len(tree) - 1
    assert tree.parents[0] == -1
    for node in range(1, len(tree)):
        assert 0 <= tree.parents[node] < node
        path = tree.path(node)
        assert path == sorted(ancestors(tree, node))
        assert tree.depths[node] == len(path) - 1
    assert tree.depth == max(tree.depths)
    chain = all(tree.parents[node] == node - 1 for node in range(1, len(tree)))
    assert tree.is_chain == chain
    assert tree.sampled == any(q is not None for q in tree.q)


@given(trees())
def test_children(tree: TokenTree) -> None:
    for parent in range(len(tree)):
        children = [node for node in range(len(tree)) if tree.parents[node] == parent]
        assert tree.children(parent) == children
        for token in range(4):
            first = next((child for child in children if tree.tokens[child] == token), None)
            assert tree.child(parent, token) == first


@given(trees(), st.lists(st.integers(0, 3), max_size=5))
def test_add_path(tree: TokenTree, tokens: list[int]) -> None:
    """The path is there afterwards, with as few new nodes as can be; adding it again adds nothing."""
    before = (list(tree.tokens), list(tree.parents), list(tree.sources))
    shared, at = 0, 0
    while shared < len(tokens) and (child := tree.child(at, tokens[shared])) is not None:
        shared, at = shared + 1, child
    last = tree.add_path(tokens, "y")
    assert [tree.tokens[node] for node in tree.path(last)[1:]] == tokens
    assert len(tree) == len(before[0]) + len(tokens) - shared
    assert (tree.tokens[: len(before[0])], tree.parents[: len(before[0])], tree.sources[: len(before[0])]) == before
    assert all(source == "y" for source in tree.sources[len(before[0]) :])
    assert all(q is None for q in tree.q[len(before[0]) :])
    size = len(tree)
    assert tree.add_path(tokens, "z") == last
    assert len(tree) == size


@given(st.lists(trees(), min_size=1, max_size=4), st.data())
def test_tree_span(batch: list[TokenTree], data: st.DataObject) -> None:
    lengths = np.array([data.draw(st.integers(0, 7)) for _ in batch])
    span = tree_span(batch, lengths, CPU)
    width = max(map(len, batch))
    assert span.ids.shape == (len(batch), width)
    mask = span.mask(torch.float64, explicit=True)
    assert mask is not None
    for row, tree in enumerate(batch):
        assert span.ids[row].tolist() == tree.tokens + [tree.tokens[0]] * (width - len(tree))
        for node in range(len(tree)):
            seen = {*range(lengths[row]), *(lengths[row] + other for other in ancestors(tree, node))}
            assert set((mask[row, 0, node] == 0).nonzero()[:, 0].tolist()) == seen
            assert span.positions[row, node] == lengths[row] + tree.depths[node]
            assert span.slots[row, node] == lengths[row] + node
        for padding in range(len(tree), width):
            assert (mask[row, 0, padding] == 0).any()  # else softmax of nothing, and nan
    lengths += 1
    assert (span.starts == lengths - 1).all()  # not a view of the cache's lengths, which commit changes


def test_chains_need_no_tree_mask() -> None:
    chain, root = TokenTree.root(1), TokenTree.root(2)
    chain.add_path([3, 4], "x")
    span = tree_span([chain, root], np.array([5, 6]), CPU)
    assert span.ancestors is None
    assert span.depths is None


class TestBestChain:
    def test_a_chain_is_itself(self) -> None:
        tree = TokenTree.root(1)
        assert tree.best_chain() is tree
        tree.add_path([2, 3], "x")
        assert tree.best_chain() is tree

    def test_promises_the_most_accepted_tokens(self) -> None:
        """Of chosen nodes: their scores are summed; one without a score is as good as sure."""
        tree = TokenTree.root(1)
        first = tree.add(2, 0, "x", score=0.5)
        tree.add(3, first, "x", score=0.4)
        second = tree.add(4, 0, "x", score=0.6)
        tree.add(5, second, "x", score=0.2)
        assert tree.best_chain().tokens == [1, 2, 3]
        tree.add(6, second, "x")
        assert tree.best_chain().tokens == [1, 4, 6]

    def test_of_drawn_nodes_the_first(self) -> None:
        """Whatever was drawn, and whatever promises more."""
        tree, q = TokenTree.root(1), torch.full((9,), 1 / 9)
        first = tree.add(2, 0, "x", q)
        tree.add_path([3, 4, 5], "x", tree.add(2, 0, "x", q))
        tree.add(6, first, "x", q)
        chain = tree.best_chain()
        assert chain.tokens == [1, 2, 6]
        assert chain.q[1] is q
        assert chain.is_chain
