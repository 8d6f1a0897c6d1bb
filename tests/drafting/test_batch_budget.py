"""The budget of a batch: the best nodes of all rows, as far as the pass that they share is worth widening."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import one_thread  # noqa: F401
from paceline.drafting.batch_budget import Share, spend
from paceline.drafting.budget import Budget
from paceline.drafting.tree import TokenTree
from paceline.targets.cost_model import Costs

CPU = Costs({1: 1.0, 2: 1.2, 4: 1.6, 8: 2.4, 16: 4.0, 64: 16.0})
FLAT = Costs({1: 1.0, 64: 1.1})


def chain(scores: Sequence[float]) -> TokenTree:
    tree = TokenTree.root(0)
    for node, score in enumerate(sorted(scores, reverse=True)):
        tree.add(1, node, "x", score=score)
    return tree


def shares(
    trees: Sequence[TokenTree], costs: Costs, rows: int, others: Sequence[int] = (), packed: bool = False
) -> list[Share]:
    return [
        Share(budget, budget.plan(tree, rows, other), other, drafting=0.0, slots=0)
        for tree, other in zip(trees, others or [0] * len(trees), strict=True)
        for budget in [Budget(costs, packed=packed)]
    ]


@given(
    st.lists(st.lists(st.floats(0.01, 1.0), max_size=6), min_size=2, max_size=5),
    st.sampled_from([CPU, FLAT]),
    st.integers(0, 2),
    st.data(),
)
def test_no_other_width_is_worth_more(scores: list[list[float]], costs: Costs, plain: int, data: st.DataObject) -> None:
    """At the probabilities and the rate of first rounds; `plain` rows have nothing to choose."""
    rows, others = len(scores) + plain, [data.draw(st.integers(0, 3)) for _ in scores]
    made = shares([chain(one) for one in scores], costs, rows, others)
    taken = spend(made, rows).trees
    narrow = max(others)

    def worth(width: int) -> float:
        found = (sum(share.plan.probabilities[: width - share.others]) for share in made)
        return sum(found) - rows / costs(rows, 0, rows) * costs(rows * (1 + width), 0, rows)

    width = max(narrow, *(share.others + tree.drafted for share, tree in zip(made, taken, strict=True)))
    best = max(worth(other) for other in range(narrow, narrow + 7))
    assert worth(width) == pytest.approx(best)
    for share, tree in zip(made, taken, strict=True):  # what is padding otherwise costs nothing
        assert tree.drafted == min(width - share.others, len(share.plan.order))


def test_one_row_likely_to_be_right_does_not_widen_the_pass_of_all() -> None:
    trees = [chain([0.95, 0.9]), *[chain([0.1, 0.05])] * 7]
    assert [tree.drafted for tree in spend(shares(trees, CPU, 8), 8).trees] == [0] * 8
    [alone] = spend(shares(trees[:1], CPU, 1), 1).trees
    assert alone.drafted == 2
    assert [tree.drafted for tree in spend(shares(trees, FLAT, 8), 8).trees] == [2] * 8


@given(
    st.lists(st.lists(st.floats(0.01, 1.0), max_size=6), min_size=2, max_size=5),
    st.sampled_from([CPU, FLAT]),
    st.integers(0, 2),
    st.data(),
)
def test_no_other_candidates_are_worth_more(
    scores: list[list[float]], costs: Costs, plain: int, data: st.DataObject
) -> None:
    """The same without padding: of all sets of candidates the best, which for each number are the likeliest."""
    rows, others = len(scores) + plain, [data.draw(st.integers(0, 3)) for _ in scores]
    made = shares([chain(one) for one in scores], costs, rows, others, packed=True)
    taken = spend(made, rows).trees
    every = sorted((p for share in made for p in share.plan.probabilities), reverse=True)

    def worth(found: Sequence[float]) -> float:
        tokens = rows + sum(others) + len(found)
        return sum(found) - rows / costs(rows, 0, rows) * costs(tokens, 0, rows)

    kept = [p for share, tree in zip(made, taken, strict=True) for p in share.plan.probabilities[: tree.drafted]]
    assert worth(kept) == pytest.approx(max(worth(every[:count]) for count in range(len(every) + 1)))


def test_without_padding_one_row_likely_to_be_right_widens_its_own_part() -> None:
    trees, costs = [chain([0.95, 0.9]), *[chain([0.1, 0.05])] * 7], Costs({1: 1.0, 8: 1.8, 16: 2.2, 64: 6.0})
    for packed, most in ((False, 0), (True, 2)):
        taken = spend(shares(trees, costs, 8, packed=packed), 8).trees
        assert [tree.drafted for tree in taken] == [most] + [0] * 7


@pytest.mark.parametrize("packed", [False, True])
def test_goes_to_plain_decoding_by_itself(packed: bool) -> None:
    """Where eight rows fill the machine: 8 tokens of width cost nearly what 16 give."""
    dear = Costs({1: 1.0, 8: 4.0, 16: 8.0, 64: 32.0})
    drafted = [
        sum(t.drafted for t in spend(shares([chain([0.7])] * n, dear, n, packed=packed), n).trees) for n in (1, 8)
    ]
    assert drafted[1] == 0
    assert spend([], 3).trees == []


class Curious(Costs):
    """Wants to know what a pass of 9 tokens takes."""

    def probe(self, widths: Sequence[int], gains: Sequence[float] = (), rate: float = 0.0) -> int:
        assert (len(gains), gains[0], rate > 0) == (len(widths), 0.0, True)
        assert all(after - before == widths[0] for before, after in pairwise(widths))
        return 9


def test_a_pass_for_the_sake_of_knowing() -> None:
    trees = [chain([0.001, 0.0005, 0.0001]), chain([0.001]), chain([])]
    assert [tree.drafted for tree in spend(shares(trees, Curious({1: 1.0, 16: 4.0}), 3), 3).trees] == [2, 1, 0]


def test_requests_learn_what_the_shared_pass_took() -> None:
    trees = [chain([0.9]), chain([0.9])]
    made = shares(trees, CPU, 2)
    slow = made[0]._replace(drafting=5.0)
    spend([slow, made[1]], 2)
    for share in made:
        share.budget.observe([1, 2])
    assert made[0].budget.rate(2) < made[1].budget.rate(2)
