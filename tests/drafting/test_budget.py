"""The automatic budget: what it chooses under given costs, what it learns, and what that comes to over a whole text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import one_thread  # noqa: F401
from paceline.drafters.prompt_lookup import PromptLookup
from paceline.drafting.budget import Budget, Calibration, Deferred, best_first
from paceline.drafting.tree import TokenTree
from paceline.errors import OptionError
from paceline.targets.cost_model import Costs

CPU = Costs({1: 1.0, 2: 1.2, 4: 1.6, 8: 2.4, 16: 4.0})
GPU = Costs({1: 1.0, 64: 1.1})


@st.composite
def scored_trees(draw: st.DrawFn) -> TokenTree:
    tree = TokenTree.root(0)
    for node in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(0, node))
        tree.add(node, parent, "x", score=(tree.scores[parent] or 1.0) * draw(st.floats(0.01, 1)))
    return tree


@given(scored_trees())
def test_best_first(tree: TokenTree) -> None:
    probabilities = [1.0, *(score or 0.0 for score in tree.scores[1:])]
    found = best_first(probabilities)
    assert sorted(found) == list(range(1, len(tree)))
    assert [probabilities[node] for node in found] == sorted(probabilities[1:], reverse=True)
    at = {node: place for place, node in enumerate(found)} | {0: -1}
    assert all(at[tree.parents[node]] < at[node] for node in range(1, len(tree)))


@given(scored_trees(), st.sampled_from([CPU, GPU]), st.sampled_from([1, 2, 8]), st.sampled_from([0, 3]))
def test_no_other_choice_is_worth_more(tree: TokenTree, costs: Costs, rows: int, others: int) -> None:
    """At the probabilities of the first round, and the rate of plain decoding."""
    budget, rate = Budget(costs), rows / costs(rows)
    chosen = budget.choose(tree, rows, others)

    def worth(probabilities: list[float]) -> float:
        return sum(probabilities) - rate * costs(rows * (1 + others + len(probabilities))) / rows

    probabilities = sorted(budget._probabilities(tree)[1:], reverse=True)
    best = max(worth(probabilities[:count]) for count in range(len(tree)))
    assert worth(budget._probabilities(chosen)[1:]) == pytest.approx(best)


def candidate(score: float, token: int = 1) -> TokenTree:
    tree = TokenTree.root(0)
    tree.add(token, 0, "x", score=score)
    return tree


def test_what_is_never_right_is_dropped_and_comes_back() -> None:
    """Also while nothing is verified, since the output shows what would have been right."""
    budget = Budget(CPU)
    assert budget.choose(candidate(0.6)).drafted == 1
    for _ in range(30):
        budget.observe([2])
        chosen = budget.choose(candidate(0.6))
    assert chosen.drafted == 0
    for _ in range(60):
        budget.observe([1])
        chosen = budget.choose(candidate(0.6))
    assert chosen.drafted == 1


def test_scores_of_one_size_say_nothing_of_others() -> None:
    budget = Budget(CPU)
    for _ in range(20):
        budget.choose(candidate(0.3))
        budget.observe([2])
    assert budget.choose(candidate(0.3)).drafted == 0
    assert budget.choose(candidate(0.6)).drafted == 1


def seen_by(budget: Budget) -> dict[tuple[str, int], list[float]]:
    """Acceptances and the sum of shares, by source and class."""
    return {(source, kind): seen for source, kind, *seen in budget._calibration.kept()}


def test_only_what_is_known_is_counted() -> None:
    """A token behind a wrong one says nothing, nor does one behind the end of what has come."""
    tree = candidate(0.9, token=5)
    tree.add(6, 1, "x", score=0.9 * 0.4)
    tree.add(7, 2, "x", score=0.9 * 0.4 * 0.3)
    for came, likely, unlikely in (
        ([5], [1, 0.9], None),
        ([5, 4], [1, 0.9], [0, 0.4]),
        ([5, 6, 7], [1, 0.9], [2, 0.7]),
        ([4, 6, 7], [0, 0.9], None),
    ):
        budget = Budget(CPU)
        budget.choose(tree)
        budget.observe(came)
        seen = {("x", 1): likely} | ({("x", 0): unlikely} if unlikely else {})
        assert seen_by(budget) == {key: pytest.approx(value) for key, value in seen.items()}


def test_what_was_seen_fades() -> None:
    budget = Budget(CPU)
    for came, expected in ((1, [1, 0.6]), (2, [0.5 ** (1 / 100), 0.6 * 0.5 ** (1 / 100) + 0.6])):
        budget.choose(candidate(0.6))
        budget.observe([came])
        assert seen_by(budget)["x", 1] == pytest.approx(expected)


def test_fading_goes_on_for_ever() -> None:
    """What is new never weighs so much that numbers overflow; what is kept is in units of a new outcome."""
    calibration, again = Calibration(fading=0.5), Calibration(fading=0.5)
    for _ in range(2000):
        calibration.fade()
        calibration.learn("x", 0, right=True, share=0.5)
    assert calibration.kept() == [["x", 0, pytest.approx(2.0), pytest.approx(1.0)]]
    again.fade()
    again.restore(calibration.kept())
    assert again.factor("x", 0) == pytest.approx(calibration.factor("x", 0))
    assert again.kept() == calibration.kept()


def test_it_may_begin_with_what_another_knows_and_tell_it_nothing() -> None:
    greedy = Calibration()
    for _ in range(200):
        greedy.learn("x", 0, right=True, share=0.4)
    sampled, kept = Calibration(greedy, tells=False), greedy.kept()
    assert sampled.factor("x", 0) == greedy.factor("x", 0)
    for _ in range(200):
        sampled.fade()
        sampled.learn("x", 0, right=False, share=0.4)
    assert greedy.kept() == kept
    assert sampled.factor("x", 0) < 0.2 < 2.0 < greedy.factor("x", 0)


def test_never_drafts_where_width_is_dear() -> None:
    dear = Costs({1: 1.0, 2: 2.0, 4: 4.0})
    assert Budget(dear).choose(candidate(0.9)).drafted == 0
    assert Budget(GPU).choose(candidate(0.05)).drafted == 1
    assert Budget(GPU).choose(candidate(0.0001)).drafted == 0


@pytest.mark.parametrize("right", [0.05, 0.3, 0.5, 0.8, 0.98])
@pytest.mark.parametrize("costs", [CPU, GPU], ids=["cpu", "gpu"])
def test_as_fast_as_the_best_fixed_budget(right: float, costs: Costs) -> None:
    """Chains whose tokens are right with a probability that the drafter's scores do not know."""
    rng = random.Random(0)
    lengths = [next(n for n in range(99) if n == 16 or rng.random() >= right) for _ in range(400)]

    def chain() -> TokenTree:
        tree, score = TokenTree.root(0), 1.0
        for node in range(16):
            tree.add(1, node, "x", score=(score := score * 0.6))
        return tree

    budget, tokens, seconds = Budget(costs), 0, 0.0
    for length in lengths:
        drafted = budget.choose(chain()).drafted
        accepted = min(drafted, length)
        budget.observe([1] * accepted + [2 if length == accepted else 1])
        tokens, seconds = tokens + accepted + 1, seconds + costs(drafted + 1)
    best = max(
        sum(min(fixed, length) + 1 for length in lengths) / len(lengths) / costs(fixed + 1) for fixed in range(17)
    )
    assert tokens / seconds > 0.97 * best


@pytest.mark.parametrize("budget", ["many", 0, -1])
def test_bad_budget(budget: int | str) -> None:
    with pytest.raises(OptionError, match="budget must be auto"):
        PromptLookup(SimpleNamespace(device=torch.device("cpu")), budget=budget)


class Curious(Costs):
    """Wants the widest pass."""

    def probe(self, widths: Sequence[int], gains: Sequence[float] = (), rate: float = 0.0) -> int:
        assert (len(gains), gains[0], rate > 0) == (len(widths), 0.0, True)
        return max(widths)


def test_a_pass_for_the_sake_of_knowing() -> None:
    tree = candidate(0.001)
    tree.add(2, 1, "x", score=0.0005)
    assert Budget(CPU).choose(tree, rows=2, others=1).drafted == 0
    assert Budget(Curious({1: 1.0, 16: 4.0})).choose(tree, rows=2, others=1).drafted == 2


def test_long_contexts_make_candidates_dearer() -> None:
    costs = Costs({1: 1.0, 16: 2.0}, context=100, score=0.001)
    tree = candidate(0.6)
    assert Budget(costs).choose(tree, slots=100).drafted == 1
    assert Budget(costs).choose(tree, slots=2000).drafted == 0


def test_requests_begin_with_what_others_have_shown() -> None:
    known = Calibration()
    for _ in range(20):
        budget = Budget(CPU, known)
        budget.choose(candidate(0.6))
        budget.observe([2])
    assert Budget(CPU).choose(candidate(0.6)).drafted == 1
    assert Budget(CPU, known).choose(candidate(0.6)).drafted == 0
    assert Budget(CPU, known).choose(candidate(0.95)).drafted == 0  # of the same class
    assert Budget(CPU, known).choose(candidate(0.4)).drafted == Budget(CPU).choose(candidate(0.4)).drafted


def test_time_for_drafting_lowers_the_rate() -> None:
    budget = Budget(CPU)
    before = budget.rate(1)
    budget.take(budget.plan(candidate(0.6)), drafting=5.0)
    budget.observe([1, 2])
    assert budget.rate(1) < before


def test_the_rate_follows_the_load() -> None:
    """A request that shared its passes and goes on alone, or the other way around, does not go on as if nothing was."""
    for before, after in ((1, 8), (8, 1)):
        budget = Budget(CPU)
        for _ in range(200):
            budget.choose(TokenTree.root(0), before)
            budget.observe([1])
        assert budget.rate(after) == pytest.approx(Budget(CPU).rate(after))


def test_a_budget_that_leaves_the_choice_to_another() -> None:
    budget, tree = Budget(CPU), candidate(0.01)
    assert Deferred(budget).choose(tree) is tree
    assert Deferred(budget).min_score(2, 0.1) == budget.min_score(2, 0.1)
    assert Deferred(None).min_score(2) == 0.0
    Deferred(budget).observe([1])


def test_of_a_target_that_reads_chains_the_best_path_is_chosen_from() -> None:
    """Of siblings only one would be verified: the others' promise counts for nothing."""
    tree = TokenTree.root(0)
    for token in (1, 2, 3):
        tree.add(token, 0, "a", score=0.3)
    last = tree.add(4, 2, "a", score=0.25)
    plan = Budget(GPU, chains=True).plan(tree)
    assert plan.order == [2, last]
    assert len(plan.probabilities) == len(plan.gains) - 1 == 2
    assert len(Budget(GPU).plan(tree).order) == 4
    assert Budget(GPU, chains=True).choose(tree).tokens == [0, 2, 4]
