"""EAGLE-2's dynamic tree."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.drafting.stepping.tree import DynamicTree
from paceline.drafting.tree import TokenTree


def test_grows_and_reranks() -> None:
    tree = DynamicTree(9, width=2, nodes=3)
    tree.propose([[1, 2]], np.log([[0.6, 0.31]]))
    assert tree.descend()
    assert (tree.expanded.tokens, tree.newest, tree.origins) == ([9, 1, 2], [1, 2], [0, 0])
    tree.propose([[3, 4], [5, 6]], np.log([[0.5, 0.4], [0.9, 0.1]]))  # 0.3, 0.24, 0.279, 0.031
    made = tree.tree("x")
    assert (made.tokens, made.parents) == ([9, 1, 2, 3], [-1, 0, 0, 1])
    assert made.scores[1:] == pytest.approx([0.6, 0.31, 0.3])
    assert tree.descend() is False  # nothing behind 0.3 is better than that


def test_siblings_of_equal_chance_keep_their_order() -> None:
    made = []
    for _ in range(2):
        tree = DynamicTree(9, width=3, nodes=7)
        tree.propose([[7, 3, 5]], [[-1.0, -1.0, -1.0]])
        assert tree.descend()
        tree.propose([[1, 2, 4]] * 3, [[0.0, -1.0, -1.0]] * 3)
        made.append(tree.tree("x"))
    assert made[0] == made[1]
    assert made[0].tokens == [9, 7, 3, 5, 1, 1, 1, 2]
    assert made[0].parents == [-1, 0, 0, 0, 1, 2, 3, 1]


def test_a_child_is_no_likelier_than_its_parent() -> None:
    """Not even where rounding says so: it must come behind it."""
    tree = DynamicTree(9, width=1, nodes=4)
    for token in (1, 2, 3, 4):
        tree.propose([[token]], [[1e-7]])
        tree.descend()
    assert tree.tree("x").parents == [-1, 0, 1, 2, 3]


def test_not_worth_it() -> None:
    tree = DynamicTree(9, width=1, nodes=9)
    tree.propose([[1]], [[np.log(0.2)]])
    assert tree.descend(min_score=0.3) is False
    assert tree.descend(min_score=0.1) is True


def test_nothing() -> None:
    assert DynamicTree(9, width=1, nodes=9).tree("x") == TokenTree.root(9)
