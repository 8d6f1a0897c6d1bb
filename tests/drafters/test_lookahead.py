"""Lookahead: its tree, and the budget of its two branches. Its output is tested with that of all drafters."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
import torch

import paceline
from helpers import Oracle, one_thread  # noqa: F401
from paceline.drafters.lookahead import FADING, Lookahead, Window
from paceline.drafters.merge import Merge
from paceline.drafting.base import Row
from paceline.drafting.budget import Budget
from paceline.drafting.tree import TokenTree
from paceline.errors import OptionError
from paceline.targets import as_target
from paceline.targets.cost_model import Costs
from paceline.targets.costs import set_costs
from paceline.targets.target import PassOutput
from tiny import byte_tokenizer, small_llama

PROMPT = [1, 2, 3, 4] * 6
FREE, DEAR = Costs({1: 1.0, 200: 1.001}), Costs({1: 1.0, 2: 2.0})


def stats(drafter: str, costs: Costs | None = None, new: int = 40) -> list[tuple[int, int]]:
    model = small_llama()
    with torch.no_grad():
        model.get_output_embeddings().weight *= 4  # greedy output then falls into repeating itself
    llm = paceline.load(model, tokenizer=byte_tokenizer(), drafter=drafter)
    if costs:
        set_costs(llm.target, costs)
    output = llm.generate(PROMPT, max_new_tokens=new, eos=())
    assert output.tokens == llm.method("none").generate(PROMPT, max_new_tokens=new, eos=()).tokens
    return [(one.drafted, one.accepted) for one in output.stats.rounds]


def test_whole_window() -> None:
    """At first there are no n-grams: the lookahead branch alone, 4 levels of 15 columns, as far as there is room."""
    rounds = stats("lookahead:budget=120")
    assert rounds[0][0] == 60
    assert max(drafted for drafted, _ in rounds) <= 120
    assert sum(accepted for _, accepted in rounds) > 5


@pytest.mark.parametrize("budget", [8, 20, 33])
def test_fixed_budget(budget: int) -> None:
    rounds = stats(f"lookahead:budget={budget}")
    assert rounds[0][0] == 4 * (budget // 8)
    assert max(drafted for drafted, _ in rounds) <= budget


def test_automatic_budget() -> None:
    assert stats("lookahead", FREE)[0][0] == 60
    assert {drafted for drafted, _ in stats("lookahead", DEAR)} == {0}


def test_guesses_stay_at_their_places_in_rounds_without_a_branch() -> None:
    """Each level guesses the places after the root, one further than the level before."""
    drafter = Lookahead(as_target(small_llama()), level=3, window=4)
    row = SimpleNamespace(ids=[*PROMPT, 7], state=(window := Window(PROMPT, 4, 2, 4, None)))
    window.levels = [deque([1, 2, 3, 4]), deque([2, 3, 4, 5])]
    drafter.observe(row, TokenTree.root(7), [0], PassOutput(torch.zeros(1, 9), {}))
    assert [level[0] for level in window.levels] == [2, 3]


def test_columns_are_held_to_what_others_brought() -> None:
    drafter = Lookahead(as_target(small_llama()))
    set_costs(drafter.target, costs := Costs({1: 1.0, 61: 1.3, 121: 1.6}))
    window = Window(PROMPT, 15, 4, 15, Budget(costs))
    assert drafter._paying(window, window.budget, 15, 1, rows=1) == 15  # at first, as the paper's settings do
    assert drafter._paying(window, window.budget, -1, 1, rows=1) == 0
    window.columns = 600.0
    assert drafter._paying(window, window.budget, 15, 1, rows=1) == 0
    window.harvest = 40.0
    assert drafter._paying(window, window.budget, 15, 1, rows=1) == 15
    assert drafter._paying(window, window.budget, 15, 1, rows=8) == 0  # whose pass is eight times as wide


@pytest.mark.parametrize("option", ["budget=7", "budget=many", "level=1", "window=0", "guess=0", "level=9:budget=15"])
def test_bad_options(option: str) -> None:
    with pytest.raises(OptionError, match="lookahead"):
        paceline.load(small_llama(), drafter=f"lookahead:{option}")


def test_max_nodes() -> None:
    target = as_target(small_llama())
    llm = paceline.load(target.model, drafter="lookahead:level=3:budget=12")
    assert llm.drafter.max_nodes(18) == 12


def test_what_others_drafted_is_not_its_harvest() -> None:
    """In a tree that is merged of several."""
    brought: list[float] = []

    class Watched(Lookahead):
        def observe(self, row: Row, tree: TokenTree, path: list[int], out: PassOutput) -> None:
            before = row.state.harvest
            super().observe(row, tree, path, out)
            brought.append(row.state.harvest - before * FADING)

    plain = paceline.load(small_llama(), tokenizer=byte_tokenizer(), drafter="none")
    truths = {tuple(PROMPT): plain.generate(PROMPT, max_new_tokens=40, eos=()).tokens}
    other = Oracle(plain.target, truths, ["truth", "nothing"])
    llm = plain.method(lambda target: Merge(target, drafters=[Watched(target, budget=40), other], budget=8))
    sources = llm.generate(PROMPT, max_new_tokens=40, eos=()).stats.sources
    assert sources.count("oracle") > 5
    assert sum(brought) == pytest.approx(sources.count("lookahead"))
