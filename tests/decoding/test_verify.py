"""Verification on the edges; that it is lossless is tested in test_losslessness.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.decoding.verify import (
    Outcome,
    at_quantile,
    chain_rejection,
    draw,
    draw_along,
    sample_match,
    tree_rejection,
    walk,
)
from paceline.drafting.tree import TokenTree
from paceline.targets.logits import argmax


def uniforms(*values: float):
    """A stream that gives these, then fails: how many draws are taken is tested with it."""
    return iter(values).__next__


def point(token: int, size: int = 4) -> torch.Tensor:
    return torch.eye(size)[token]


def chain(*tokens: int, q: list[torch.Tensor | None] | None = None) -> TokenTree:
    tree = TokenTree.root(0)
    for node, token in enumerate(tokens):
        tree.add(token, node, "x", q[node] if q else None)
    return tree


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_argmax(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, 0, 7] = logits[0, 0, 40] = 9.0  # of equals the first
    logits[1, 2] = -torch.inf
    logits[1, 2, 4] = 0.0
    want = [[[float(x) for x in row] for row in rows] for rows in logits]
    assert argmax(logits) == [[row.index(max(row)) for row in rows] for rows in want]


def test_walk() -> None:
    tree = TokenTree.root(9)
    for token, parent in [(1, 0), (2, 0), (1, 0), (3, 1), (4, 3), (5, 2)]:
        tree.add(token, parent, "x")
    choice = [1, 3, 5, 4, 8, 0, 7]
    assert walk(tree, choice) == Outcome([0, 1, 4], 8)  # by the first of the two children that hold 1
    choice[0] = 2
    assert walk(tree, choice) == Outcome([0, 2, 6], 7)
    choice[0] = 6
    assert walk(tree, choice) == Outcome([0], 6)
    assert walk(TokenTree.root(9), [5]) == Outcome([0], 5)


class TestDraw:
    def test_never_an_impossible_token(self) -> None:
        p = torch.tensor([0, 0, 0.5, 0, 0.5, 0])
        assert draw(p, 0.0) == 2
        assert draw(p, 0.4999) == 2
        assert draw(p, 0.5) == 4
        assert draw(p, 1 - 2**-53) == 4

    @given(st.lists(st.floats(0, 5), min_size=1, max_size=8).filter(lambda p: sum(p) > 1e-3), st.floats(0, 0.999999))
    def test_is_the_quantile(self, p: list[float], u: float) -> None:
        """Of the distribution, normalised or not."""
        token = draw(torch.tensor(p, dtype=torch.float64), u)
        mass = np.cumsum(p)
        assert p[token] > 0
        assert mass[token] >= u * mass[-1] * (1 - 1e-12)
        assert token == 0 or mass[token - 1] <= u * mass[-1] * (1 + 1e-12)

    def test_large_vocabulary(self) -> None:
        """In float32 the mass of the last of 200,000 tokens would be lost in the sum."""
        p = torch.full((200_000,), 5e-6)
        drawn = [draw(p, u) for u in np.linspace(0, 1, 101)[:-1]]
        assert np.abs(np.diff(drawn) - 2000).max() <= 1


def match_along(tree: TokenTree, scores: Tensor, uniforms: Sequence[float]) -> Outcome:
    return draw_along(tree, lambda node, u: at_quantile(scores[node], u, 1.0), uniforms)


@pytest.mark.parametrize("match", [sample_match, match_along])
class TestSampleMatch:
    def test_one_draw_a_depth(self, match: Callable[..., Outcome]) -> None:
        """Siblings are not drawn apart: a position has one uniform, whichever node stands there."""
        tree = TokenTree.root(0)
        left, right = tree.add(0, 0, "x"), tree.add(1, 0, "x")
        tree.add(2, left, "x")
        tree.add(2, right, "x")
        p = torch.full((5, 4), 0.25).log()
        assert match(tree, p, [0.1, 0.6, 0.9]) == Outcome([0, 1, 3], 3)
        assert match(tree, p, [0.3, 0.6, 0.1]) == Outcome([0, 2, 4], 0)
        assert match(tree, p, [0.3, 0.3, 0.1]) == Outcome([0, 2], 1)

    def test_is_draw_at_each_node(self, match: Callable[..., Outcome]) -> None:
        rng = np.random.default_rng(0)
        p = torch.tensor(rng.dirichlet(np.ones(6), size=1))
        for u in rng.random(50):
            assert match(TokenTree.root(0), p.log(), [u]).token == draw(p[0], u)


class TestRejection:
    @pytest.mark.parametrize("verify", [chain_rejection, tree_rejection])
    def test_certain_cases(self, verify) -> None:
        p, q = torch.stack([point(1), point(2), point(3)]), [point(1), point(2)]
        assert verify(chain(1, 2, q=q), p, uniforms(0.99, 0.99, 0.5)) == Outcome([0, 1, 2], 3)
        assert verify(chain(1, 0, q=[point(1), point(0)]), p, uniforms(0.99, 0.0, 0.5)) == Outcome([0, 1], 2)
        assert verify(chain(1, 2), p, uniforms(0.99, 0.99, 0.5)) == Outcome([0, 1, 2], 3)
        assert verify(chain(3, 2), p, uniforms(0.0, 0.5)) == Outcome([0], 1)
        assert verify(TokenTree.root(0), p[:1], uniforms(0.5)) == Outcome([0], 1)

    @pytest.mark.parametrize("verify", [chain_rejection, tree_rejection])
    def test_ratio(self, verify) -> None:
        """Accepted below p / q, and afterwards from the normalised rest of p - q."""
        p = torch.tensor([[0.2, 0.3, 0.5, 0.0], [0.25] * 4])
        q = torch.tensor([0.5, 0.1, 0.1, 0.3])
        assert verify(chain(0, q=[q]), p, uniforms(0.39, 0.6)) == Outcome([0, 1], 2)
        for u, token in ((0.0, 1), (0.33, 1), (0.34, 2), (0.99, 2)):  # the rest is (0, .2, .4, 0) / .6
            assert verify(chain(0, q=[q]), p, uniforms(0.41, u)) == Outcome([0], token)
        assert verify(chain(3, q=[q]), p, uniforms(0.0, 0.0)) == Outcome([0], 1)  # p = 0 is never accepted
        # A fixed proposal is a point mass: accepted with probability p.
        assert verify(chain(0), p, uniforms(0.19, 0.0)) == Outcome([0, 1], 0)
        assert verify(chain(0), p, uniforms(0.21, 0.37)) == Outcome([0], 1)
        assert verify(chain(0), p, uniforms(0.21, 0.38)) == Outcome([0], 2)

    @pytest.mark.parametrize("verify", [chain_rejection, tree_rejection])
    def test_drawn_from_nothing(self, verify) -> None:
        """A q that is no distribution proposes nothing: the answer is p's."""
        p = torch.tensor([[0.2, 0.3, 0.5, 0.0], [0.25] * 4])
        for u, token in ((0.19, 0), (0.49, 1), (0.99, 2)):
            assert verify(chain(3, q=[torch.full((4,), torch.nan)]), p, uniforms(0.0, u)) == Outcome([0], token)

    @pytest.mark.parametrize("verify", [chain_rejection, tree_rejection])
    @given(seed=st.integers(0, 10**6))
    def test_equal_distributions_are_always_accepted(self, verify, seed: int) -> None:
        """Whatever rounding leaves of p - p, there is an answer and it is possible."""
        rng = np.random.default_rng(seed)
        p = torch.tensor(rng.dirichlet(np.full(5, 0.3), size=2), dtype=torch.float32)
        token = draw(p[0], rng.random())
        path, last = verify(chain(token, q=[p[0]]), p, rng.random)
        assert path == [0, 1]
        assert p[1, last] > 0

    def test_siblings_without_replacement(self) -> None:
        """After a rejection q is renormalised without the token that was rejected."""
        p, q = torch.tensor([[0.1, 0.3, 0.6]] * 3), torch.tensor([0.5, 0.25, 0.25])
        tree = TokenTree.root(0)
        tree.replacement = False
        tree.add(0, 0, "x", q)
        tree.add(1, 0, "x", q)
        # 0 is accepted below .2; then p is (0, .05, .35) / .4 and q (0, .5, .5): 1 is accepted below .25.
        assert tree_rejection(tree, p, uniforms(0.21, 0.24, 0.9)) == Outcome([0, 2], 2)
        assert tree_rejection(tree, p, uniforms(0.21, 0.26, 0.9)) == Outcome([0], 2)
        tree.replacement = True  # p as before, q (.5, .25, .25): 1 is accepted below .5
        assert tree_rejection(tree, p, uniforms(0.21, 0.49, 0.9)) == Outcome([0, 2], 2)
        assert tree_rejection(tree, p, uniforms(0.21, 0.51, 0.9)) == Outcome([0], 2)

    def test_inputs_are_left_alone(self) -> None:
        p, q = torch.tensor([[0.2, 0.3, 0.5]] * 3), torch.tensor([0.8, 0.1, 0.1])
        tree = TokenTree.root(0)
        tree.add(0, 0, "x", q)
        tree.add(0, 0, "x")
        kept = p.clone(), q.clone()
        tree_rejection(tree, p, uniforms(0.99, 0.99, 0.99))
        assert torch.equal(p, kept[0])
        assert torch.equal(q, kept[1])
