"""What passes cost: as given, as measured, and as learned from the passes that are run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline
from helpers import one_thread  # noqa: F401
from paceline.decoding.engine import Engine
from paceline.decoding.request import Request
from paceline.drafters.dispatch import Dispatch
from paceline.drafters.layer_skip.drafter import LayerSkip
from paceline.drafters.none import NoDrafter
from paceline.drafting.budget import Budget
from paceline.drafting.tree import TokenTree
from paceline.errors import OptionError
from paceline.policies.fixed import Fixed
from paceline.profiling import Roofline, measure
from paceline.targets import as_target
from paceline.targets.cost_model import Costs, LearnedCosts
from paceline.targets.costs import WIDTHS, costs_of, known_costs, measure_costs, set_costs
from tiny import small_llama


# -- given ---------------------------------------------------------------------------------------------------------
def test_given_costs() -> None:
    costs = Costs({1: 1.0, 2: 3.0, 4: 2.5, 8: 6.5})  # 2 cannot really cost more than 4
    assert [costs(width) for width in (1, 2, 3, 4, 6, 8, 10, 200)] == pytest.approx(
        [1, 2.5, 2.5, 2.5, 4.5, 6.5, 8.5, 198.5]
    )
    assert costs.slope == pytest.approx(0.5)
    costs.observe(1, 7.0)
    assert costs(1) == 1.0


@pytest.mark.parametrize("widths", [range(1, 9), range(4, 101, 4), [100, 128, 129, 300]])
@pytest.mark.parametrize(("slots", "rows"), [(None, 1), (0, 1), (500, 4)])
def test_several_widths_at_once(widths: range | list[int], slots: int | None, rows: int) -> None:
    costs = Costs({1: 1.0, 4: 2.5, 8: 6.5}, context=100, read=0.002, score=0.001)
    assert costs.series(widths, slots, rows) == pytest.approx([costs(width, slots, rows) for width in widths])
    assert costs.probe([1, 2]) is None


def test_costs_of_longer_contexts() -> None:
    costs = Costs({1: 1.0, 8: 1.7}, context=100, read=0.001, score=0.0001)
    assert costs(4, 100) == costs(4) == pytest.approx(1.3)
    assert costs(4, 300) == pytest.approx(1.3 + 200 * (0.001 + 4 * 0.0001))
    assert costs(4, 300, rows=2) == pytest.approx(1.3 + 200 * (0.002 + 4 * 0.0001))
    assert costs(1, 0) > 0


@pytest.mark.parametrize("passes", [{1: 1.0}, {1: 0.0, 2: 1.0}, {1: 1.0, 2: float("inf")}, {1: 1.0, 2: float("nan")}])
def test_no_costs(passes: dict[int, float]) -> None:
    with pytest.raises(OptionError, match="costs"):
        Costs(passes)


# -- measured ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("context", [8, 20, 256])
def test_costs_are_measured(context: int) -> None:
    costs = measure_costs(as_target(small_llama(max_position_embeddings=context)), limit=60)
    assert costs.widths.tolist() == [width for width in WIDTHS if width <= max(context // 2, context - 64)]
    assert all(0 < costs(int(width)) < 10 for width in costs.widths)


def test_measuring_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass takes 10 ms and 2 ms more for each token."""
    now, target = [0.0], as_target(small_llama())
    forward = target.forward

    def slow(span: Any, *rest: Any) -> Any:
        now[0] += 0.010 + 0.002 * span.width
        return forward(span, *rest)

    monkeypatch.setattr(target, "forward", slow)
    monkeypatch.setattr("paceline.targets.costs.time", SimpleNamespace(perf_counter=lambda: now[0]))
    costs = measure_costs(target)
    assert now[0] <= 0.25
    assert costs(8) / costs(1) == pytest.approx(26 / 12, rel=0.1)


def test_a_large_model_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    target = as_target(small_llama())
    target.weight_bytes, target.weight_count = 14 * 10**9, 7 * 10**9
    monkeypatch.setattr(target, "forward", None)
    costs = measure_costs(target)
    assert 0.3 < costs(1) < 3
    assert costs(1) < costs(8) < 8 * costs(1)


def test_a_context_of_two_tokens() -> None:
    assert measure_costs(as_target(small_llama(max_position_embeddings=2)))(1) > 0


def test_measured_once_and_before_the_first_request() -> None:
    llm = paceline.load(small_llama().float(), drafter="prompt-lookup")
    costs = known_costs(llm.target)
    assert costs is not None
    assert costs_of(llm.target) is costs
    given = set_costs(llm.target, Costs({1: 1.0, 2: 2.0}))
    assert costs_of(llm.target) is given
    others = costs_of(llm.target, plain=False)
    assert others is not given
    assert [others(width) for width in (1, 2)] == [1.0, 2.0]
    set_costs(llm.target, Costs({1: 1.0, 2: 3.0}))  # from which the others start again
    assert costs_of(llm.target, plain=False)(2) == 3.0
    assert known_costs(paceline.load(small_llama().float(), drafter="none").target) is None


@pytest.fixture
def roof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring the roofline takes seconds."""
    monkeypatch.setattr("paceline.profiling.profile.measure_roofline", lambda device, dtype: Roofline(1e9, 1e10))


@pytest.mark.usefixtures("cache_dir", "roof")
@pytest.mark.parametrize("contexts", [(), (8, 20)])
def test_costs_of_a_stored_profile(contexts: tuple[int, ...]) -> None:
    target = as_target(small_llama())
    [profile] = measure([target], "tiny", context=4, repeats=1, widths=(1, 2, 3), contexts=contexts)
    assert list(profile.contexts) == list(contexts)
    path = profile.save()
    stored = json.loads(path.read_text())
    for width, timing in stored["passes"].items():
        timing["median"] = 0.001 * (3 + int(width))
    for context in stored["contexts"]:
        stored["contexts"][context] = {width: 0.001 * (3 + width) + 1e-5 * (int(context) - 4) for width in (1, 2, 3)}
    path.write_text(json.dumps(stored))
    costs = costs_of(target)
    assert [costs(width) for width in (1, 2, 3)] == pytest.approx([0.004, 0.005, 0.006], rel=0.02)
    assert costs.read == pytest.approx(1e-5 if contexts else 0.0, abs=1e-8)


@pytest.mark.usefixtures("cache_dir", "roof")
@pytest.mark.parametrize("text", ["", "{}", "[]", '{"context": 4, "passes": {"1": {"median": 1}}}', "null"])
def test_a_bad_profile_is_measured_anew(text: str) -> None:
    target = as_target(small_llama())
    [profile] = measure([target], "tiny", context=4, repeats=1, widths=(1, 2), contexts=())
    profile.save().write_text(text)
    assert costs_of(target)(64) == 1.5  # which tests have for measured


# -- learned -------------------------------------------------------------------------------------------------------
@given(st.floats(1e-4, 10), st.floats(0, 1))
def test_a_good_first_opinion_stands(fixed: float, each: float) -> None:
    costs = LearnedCosts({width: fixed * (1 + each * width) for width in WIDTHS})
    assert [costs(width) for width in WIDTHS] == pytest.approx([fixed * (1 + each * w) for w in WIDTHS], rel=1e-3)


def test_one_wrong_measurement_is_put_right_by_its_neighbours() -> None:
    costs = LearnedCosts({width: (4 if width == 64 else 1) * (5 + width) for width in (1, 2, 4, 8, 16, 32, 64)})
    assert costs(64) < 3 * 69
    assert costs(8) == pytest.approx(13, rel=0.25)


def test_another_programs_burst_passes() -> None:
    costs = LearnedCosts({width: 0.005 + 0.001 * width for width in WIDTHS})
    before = costs(8) / costs(1)
    for turn in range(300):
        slower = 3.0 if 100 <= turn < 140 else 1.0
        costs.observe(1 + turn % 4, slower * (0.005 + 0.001 * (1 + turn % 4)))
        if turn == 139:
            assert costs(8) / costs(1) == pytest.approx(before, rel=0.1)
    assert costs(8) / costs(1) == pytest.approx(before, rel=0.05)
    assert costs(1) == pytest.approx(0.006, rel=0.05)


def test_one_pass_cannot_poison_it() -> None:
    costs = LearnedCosts({width: 0.005 + 0.001 * width for width in WIDTHS})
    for _ in range(50):
        costs.observe(4, 0.009)
    costs.observe(4, 90.0)
    assert costs(4) == pytest.approx(0.009, rel=0.15)


def test_what_contexts_add_is_not_learned_as_width() -> None:
    costs = LearnedCosts({width: 1.0 + 0.1 * width for width in WIDTHS}, context=64, read=0.001)
    for _ in range(100):
        costs.observe(2, 1.2 + 0.5, slots=564)
    assert costs(2) == pytest.approx(1.2, rel=0.02)
    costs.observe(2, 0.3, slots=564)  # less than the context alone would take: noise
    assert costs(2) == pytest.approx(1.2, rel=0.02)


@pytest.mark.parametrize(("read", "score"), [(1e-5, 0.0), (0.0, 0.0), (0.0, 3e-6), (1e-6, 5e-7)])
@pytest.mark.parametrize("rows", [1, 8])
def test_what_contexts_add_is_learned(read: float, score: float, rows: int) -> None:
    """Of passes of two widths, what those of others take after long contexts: measured wrongly, or not at all."""

    def true(width: int, slots: float) -> float:
        return 0.005 + 0.001 * width + (slots - 64) * (rows * 1e-6 + width * 5e-7)

    costs = LearnedCosts({width: true(width, 64) for width in WIDTHS}, context=64, read=read, score=score)
    rng = random.Random(0)
    for turn in range(300):
        width, slots = rows * (2 + turn % 2), rng.uniform(50, 700)
        costs.observe(width, true(width, slots) * rng.lognormvariate(0, 0.08), slots, rows)
    for width in (1, 2, 4):
        assert costs(rows * width, 600, rows) == pytest.approx(true(rows * width, 600), rel=0.1)


def test_rare_passes_for_the_sake_of_knowing() -> None:
    costs, probed = LearnedCosts({width: 1.0 + 0.1 * width for width in WIDTHS}), []
    for turn in range(300):
        wanted = costs.probe([1, 2, 3, 16])
        if wanted is not None:
            probed.append((turn, wanted))
        costs.observe(wanted or 1, 1.0 + 0.1 * (wanted or 1))
    assert [turn for turn, _ in probed] == [8, 16, 32, 64, 128, 256]
    assert probed[0][1] == 16
    assert costs.probe([]) is None


def test_no_pass_for_knowing_what_cannot_be_the_best() -> None:
    """At 1 token a second width 16 would have to be far faster than is believed; width 3 may well be the best."""

    def due(gains: list[float]) -> int | None:
        costs = LearnedCosts({width: 1.0 + 0.1 * width for width in WIDTHS})
        for _ in range(8):
            costs.observe(1, 1.1)
        return costs.probe([1, 3, 16], gains, 1.0)

    assert due([0.0, 0.0, 0.0]) == 16
    assert due([0.0, -0.01, -9.0]) == 3
    assert due([0.0, -9.0, -9.0]) == 1


def steps(width: int) -> float:
    return 0.005 + 0.0004 * width + 0.0015 * (width > 8)


def flat(width: int) -> float:
    return 0.030 + 0.001 * width


def dear(width: int) -> float:
    return 0.004 + 0.0012 * width


def decoded(costs: Costs, true: Callable[[int], float], seed: int, right: float) -> float:
    """Tokens a second, by the made-up clock of `true`, of the second half of 400 rounds; passes that are run are noisy,
    and 40 of them are slowed by another program.
    """
    rng, budget, tokens, seconds = random.Random(seed), Budget(costs), 0, 0.0
    for turn in range(400):
        tree = TokenTree.root(0)
        for node in range(16):
            tree.add(1, node, "x", score=0.6 ** (node + 1))
        length = next(n for n in range(99) if n == 16 or rng.random() >= right)
        drafted = budget.choose(tree, slots=64).drafted
        accepted = min(drafted, length)
        budget.observe([1] * accepted + [2 if length == accepted else 1])
        took = true(drafted + 1)
        slower = rng.lognormvariate(0, 0.05) + (rng.random() < 0.1) * rng.random()
        costs.observe(drafted + 1, took * slower * (3 if 60 <= turn < 100 else 1), 64)
        if turn >= 200:
            tokens, seconds = tokens + accepted + 1, seconds + took
    return tokens / seconds


@pytest.mark.parametrize("true", [steps, flat, dear])
@pytest.mark.parametrize("right", [0.4, 0.8])
def test_a_profile_taken_under_load_corrects_itself(true: Callable[[int], float], right: float) -> None:
    """Within 200 rounds: each width was measured up to six times too slow."""
    found = []
    for seed in range(4):
        rng = random.Random(100 + seed)
        loaded = {width: true(width) * rng.choice([1, 1, 2, 4]) * rng.uniform(1, 1.5) for width in WIDTHS}
        best = decoded(Costs({width: true(width) for width in range(1, 65)}), true, seed, right)
        found.append(decoded(LearnedCosts(loaded), true, seed, right) / best)
    assert np.mean(found) > 0.97
    assert min(found) > 0.92


def test_engines_tell_what_passes_and_rounds_take(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, float | None]] = []

    class Told(Costs):
        def __init__(self, of: str) -> None:
            super().__init__({1: 1.0, 2: 2.0})
            self.of = of

        def observe(self, width: int, seconds: float, slots: float | None = None, rows: int = 1) -> None:
            assert seconds > 0
            seen.append((self.of, width, slots))

    target = as_target(small_llama())
    drafter = NoDrafter(target)
    set_costs(target, Told("passes"))
    set_costs(drafter, Told("rounds"))
    engine = Engine(target, drafter)
    engine.add(Request([5, 6, 7], limit=2, policy=Fixed()))
    engine.step()
    assert seen == [("passes", 1, 2.0), ("rounds", 0, None)]
    seen.clear()
    engine.add(Request([5, 6, 7, 8], limit=2, policy=Fixed()))
    while not engine.idle:
        engine.step()
    assert ("passes", 1, 3.0) in seen
    seen.clear()
    shared = Engine(target, Dispatch(target, {"none": drafter}))
    shared.add(Request([5, 6, 7], limit=2, policy=Fixed()))
    shared.step()
    assert ("rounds", 0, None) in seen


def test_a_forward_without_a_token_is_no_part_of_a_plain_round() -> None:
    """The policy leaves the token out: the round is a plain one, but for the time that its draft took."""

    class Drops(Fixed):
        def keep(self, *given: object) -> bool:
            return False

    class Noted(Costs):
        told: ClassVar[list[tuple[int, float]]] = []

        def observe(self, width: int, seconds: float, *given: object, **more: object) -> None:
            self.told.append((width, seconds))

    drafter = LayerSkip(as_target(small_llama()))
    set_costs(drafter, Noted({0: 1.0, 4: 2.0}))
    request = Request([5, 6, 7], limit=6, policy=Drops(k=4))
    [*_] = Engine(drafter.target, drafter).run([request])
    rounds = [one.seconds for one in request.stats.rounds[:-1]]  # the last has no room for a draft
    assert all(one["draft"] > 0 for one in rounds)
    assert Noted.told[:-1] == [(0, pytest.approx(one["verify"] + one["sample"] + one["other"])) for one in rounds]


def test_what_is_wider_than_all_widths_is_not_learned_as_the_widest() -> None:
    """Rounds of a drafter are measured up to four tokens, and policies draft more."""
    costs = LearnedCosts({drafted: 1 + 0.15 * drafted for drafted in (0, 1, 2, 4)})
    for _ in range(100):
        for drafted in (0, 2, 8):
            costs.observe(drafted, 1 + 0.15 * drafted)
    assert costs(4) == pytest.approx(1.6, rel=0.1)
    assert costs(8) == pytest.approx(2.2, rel=0.1)


def test_what_a_probe_shows_is_learned() -> None:
    """Though of many passes few are learned from."""
    costs = LearnedCosts({width: 1 + 0.1 * width for width in WIDTHS})
    for _ in range(64):
        costs.observe(1, 1.1)
    assert costs.probe([1, 16]) == 16
    before = costs(16)
    costs.observe(16, 1.2)
    assert costs(16) < before


def test_no_probe_where_there_is_no_choice() -> None:
    costs = LearnedCosts({width: 1 + 0.1 * width for width in WIDTHS})
    for _ in range(8):
        costs.observe(1, 1.1)
    assert costs.probe([1], [0.0]) is None
    assert costs.probe([1, 16]) == 16
