"""Candidates of several sources in one tree: each token once, and each source believed as far as it can be trusted."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.drafting.budget import Budget
from paceline.drafting.pool import Pool
from paceline.drafting.tree import TokenTree
from paceline.targets.cost_model import Costs


def tree(source: str, *nodes: tuple[int, int, float]) -> TokenTree:
    """Of `(token, parent, score)`."""
    made = TokenTree.root(1)
    for token, parent, score in nodes:
        made.add(token, parent, source, score=score)
    return made


def pool_of(*trees: TokenTree, budget: Budget | None = None) -> TokenTree:
    pool = Pool(1, 10, budget, None)
    for own in trees:
        pool.take(0, own, 0.0)
    return pool.tree


def nodes(of: TokenTree) -> list[tuple[Any, ...]]:
    scores = [pytest.approx(score) for score in of.scores[1:]]
    return list(zip(of.tokens[1:], of.parents[1:], of.sources[1:], scores, strict=True))


FIRST = [(5, 0, 0.5), (6, 1, 0.2), (7, 0, 0.3)]


def test_a_surer_source_raises_what_others_have_after_its_token() -> None:
    """6 is right in 0.4 of the cases in which 5 is: that stays so."""
    together = pool_of(tree("a", *FIRST), tree("b", (5, 0, 0.9), (8, 1, 0.45)))
    assert nodes(together) == [(5, 0, "b", 0.9), (6, 1, "a", 0.36), (7, 0, "a", 0.3), (8, 1, "b", 0.45)]


def test_of_equals_the_first_counts_and_a_less_sure_one_changes_nothing() -> None:
    first = tree("a", *FIRST)
    assert nodes(pool_of(tree("a", *FIRST), tree("b", (5, 0, 0.5), (6, 1, 0.1)))) == nodes(first)


def test_after_a_less_sure_source_its_own_tokens_follow_the_surer_ones_score() -> None:
    """9 is right wherever 5 is, says b; of 5 a is surer."""
    together = pool_of(tree("a", *FIRST), tree("b", (5, 0, 0.2), (9, 1, 0.2)))
    assert nodes(together)[-1] == (9, 1, "b", 0.5)


def test_a_source_that_says_too_much_is_not_believed() -> None:
    budget = Budget(Costs({1: 1.0, 16: 1.1}))
    for _ in range(60):  # of b nothing is right, of a half of what it says and more
        tried = tree("b", (8, 0, 0.9))
        tried.add(5, 0, "a", score=0.5)
        budget.choose(tried)
        budget.observe([5])
    together = pool_of(tree("a", *FIRST), tree("b", (5, 0, 0.9)), budget=budget)
    assert nodes(together) == nodes(tree("a", *FIRST))
