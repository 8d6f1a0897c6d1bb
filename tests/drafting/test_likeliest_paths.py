"""Medusa's trees against every possible one."""

from __future__ import annotations

import itertools
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafting.likeliest_paths import Choice, likeliest

ACCURACIES = st.lists(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=3), min_size=1, max_size=3)


def choices(accuracies: list[list[float]]) -> list[list[Choice]]:
    """Ranks for tokens, the most accurate first."""
    return [sorted(map(Choice, ranks, range(len(ranks))), reverse=True) for ranks in accuracies]


@given(ACCURACIES, st.integers(1, 20))
def test_no_tree_is_better(accuracies: list[list[float]], nodes: int) -> None:
    """A tree gives as many tokens as the chances of its nodes add up to; of all that are whole none gives more."""
    every = [
        path
        for depth in range(1, len(accuracies) + 1)
        for path in itertools.product(*(range(len(ranks)) for ranks in accuracies[:depth]))
    ]
    chance = {path: prod(accuracies[at][rank] for at, rank in enumerate(path)) for path in every}
    found = likeliest(choices(accuracies), nodes)
    assert len(found) == min(nodes, len(every))
    paths: list[tuple[int, ...]] = [()]
    for node in found:
        paths.append((*paths[node.parent], node.token))
        assert node.depth == len(paths[-1])
        assert node.score == pytest.approx(chance[paths[-1]])
    assert len(set(paths)) == len(paths)
    best = sorted(chance.values(), reverse=True)[:nodes]  # which is a bound, as no path is likelier than its parent's
    assert [node.score for node in found] == pytest.approx(best)


def test_every_tree_of_a_few_nodes() -> None:
    """The bound above, once by listing all trees of three nodes."""
    accuracies = [[0.6, 0.25], [0.5, 0.3]]
    paths = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    trees = [tree for tree in itertools.combinations(paths, 3) if all(path[:-1] in ((), *tree) for path in tree)]
    gains = [sum(prod(accuracies[at][rank] for at, rank in enumerate(path)) for path in tree) for tree in trees]
    assert sum(node.score for node in likeliest(choices(accuracies), 3)) == pytest.approx(max(gains))


@given(ACCURACIES, st.integers(1, 20), st.floats(0, 1))
def test_a_smaller_tree_is_the_beginning(accuracies: list[list[float]], nodes: int, min_score: float) -> None:
    whole = likeliest(choices(accuracies), 40)
    assert likeliest(choices(accuracies), nodes) == whole[:nodes]
    assert likeliest(choices(accuracies), 40, min_score) == [node for node in whole if node.score > min_score]


def test_what_is_never_right_is_left_out() -> None:
    assert likeliest([[Choice(0.0, 5)]], 3) == []
    assert likeliest([], 3) == []
