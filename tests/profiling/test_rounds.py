"""What one more drafted token costs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from helpers import one_thread  # noqa: F401
from paceline.api import LLM
from paceline.decoding.engine import Engine
from paceline.decoding.request import Request
from paceline.drafters.draft_model import DraftModel
from paceline.drafters.layer_skip.drafter import LayerSkip
from paceline.drafters.medusa.drafter import Medusa
from paceline.drafters.medusa.head import MedusaHead
from paceline.drafters.prompt_lookup import PromptLookup
from paceline.policies import POLICIES
from paceline.policies.fixed import Fixed
from paceline.policies.pace import Pace
from paceline.profiling import rounds
from paceline.profiling.rounds import _round_seconds, pass_cost, ready, round_cost, round_seconds
from paceline.targets.cost_model import Costs, LearnedCosts
from paceline.targets.costs import set_costs
from paceline.targets.reference import BlockTarget, as_target
from paceline.targets.span import Span
from paceline.targets.target import PassOutput
from tiny import small_llama


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As nowhere else in the tests."""
    monkeypatch.setattr(rounds, "_round_seconds", _round_seconds)


@pytest.fixture(scope="module")
def target() -> BlockTarget:
    target = BlockTarget(small_llama())
    set_costs(target, Costs({1: 0.010, 5: 0.014, 16: 0.1}))
    return target


def test_without_a_model_it_is_the_wider_pass(target: BlockTarget) -> None:
    cost = round_cost(PromptLookup(target))
    assert [cost(drafted) for drafted in (0, 1, 4, 15)] == pytest.approx([1.0, 1.1, 1.4, 10.0])


def test_with_one_it_is_its_forward_as_well(target: BlockTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass takes 1 s and 0.1 s more for every further token, a draft 0.25 s a token; other work slows some."""
    now = 0.0

    def takes(seconds: float) -> None:
        nonlocal now
        now += seconds * (2 if 10 < now < 25 else 1)

    def forward(span: Span, *rest: Any, **more: Any) -> PassOutput:
        takes(1 + 0.1 * (span.ids.shape[1] - 1))
        return original(span, *rest, **more)

    def step(*given: Any) -> Any:
        takes(0.25)
        return LayerSkip.step(drafter, *given)

    original, drafter = target.forward, LayerSkip(target)
    monkeypatch.setattr(target, "forward", forward)
    monkeypatch.setattr(drafter, "step", step)
    monkeypatch.setattr("paceline.decoding.stats.now", lambda: now)
    cost = round_cost(drafter)
    assert [cost(drafted) for drafted in range(5)] == pytest.approx([1 + 0.35 * drafted for drafted in range(5)])
    measured = now
    assert round_seconds(drafter)(2) == pytest.approx(1.7)
    assert now == measured > 25


class KeepsTwo(Fixed):
    """Has a third token drafted, and does not keep it."""

    def keep(self, q: Any, depth: int, hidden: Any = None) -> bool:
        return depth < 2


def test_a_forward_that_gave_no_token_is_not_of_the_round(target: BlockTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft takes 1 s a forward, and the pass no time."""
    now, seen = 0.0, set[tuple[int, float]]()

    def step(*given: Any) -> Any:
        nonlocal now
        now += 1.0
        return LayerSkip.step(drafter, *given)

    class Noted(Costs):
        def observe(self, width: int, seconds: float, *rest: Any, **more: Any) -> None:
            seen.add((width, seconds))

    drafter = LayerSkip(target)
    set_costs(drafter, Noted({0: 1.0, 8: 2.0}))
    monkeypatch.setattr(drafter, "step", step)
    monkeypatch.setattr("paceline.decoding.stats.now", lambda: now)
    request = Request([5, 6, 7], limit=20, policy=KeepsTwo(k=4))
    for _ in Engine(target, drafter).run([request]):
        pass
    assert 2 in {width for width, _ in seen}  # the last rounds have room for less
    assert all(seconds == width for width, seconds in seen)
    assert now > sum(one.depth for one in request.stats.rounds)


def test_policies_that_ask(target: BlockTarget) -> None:
    """Decoding goes on as if nothing had been measured in between."""
    drafter = LayerSkip(target)
    plain = LLM(target, drafter, POLICIES.parse("fixed:k=0")).generate([5, 6, 7], max_new_tokens=12)
    for policy in ("beta-ts:cost=auto", "cali-ts:cost=auto", "pace"):
        llm = LLM(target, drafter, POLICIES.parse(policy))
        [request] = llm.requests([[5, 6, 7]], max_new_tokens=12)
        for _ in llm.engine.run([request]):
            pass
        assert request.output == plain.tokens
        assert request.policy.long_run.cost(3) == round_cost(drafter)(3)


def test_verifying_alone_costs_no_more_than_the_round(target: BlockTarget) -> None:
    drafter = PromptLookup(target)
    set_costs(drafter, Costs({0: 0.02, 4: 0.03, 8: 0.2}))
    cost, whole = pass_cost(drafter), round_cost(drafter)
    assert cost(0) == 1
    assert cost(4) == pytest.approx(1 + 0.004 / 0.02)
    assert all(cost(drafted) <= whole(drafted) for drafted in range(16))


def test_where_no_node_of_a_tree_pays() -> None:
    model = small_llama()
    dear = as_target(model)
    set_costs(dear, Costs({1: 0.01, 5: 1.0, 16: 4.0}))
    drafter = Medusa(dear, head=MedusaHead.from_target(model, heads=2), tree="dynamic")
    assert round_cost(drafter)(4) == pytest.approx(100)


def test_a_request_begins_where_the_one_before_stood(target: BlockTarget) -> None:
    llm, other = (LLM(target, LayerSkip(target), POLICIES.parse("pace")) for _ in range(2))
    set_costs(llm.engine.drafter, Costs({0: 1.0, 8: 1.01}))
    first, second = llm.requests([[5, 6, 7]] * 2, max_new_tokens=12)  # both made before either has begun
    [elsewhere] = other.requests([[5, 6, 7]], max_new_tokens=12)
    unlearned = elsewhere.policy.ahead.mean
    list(llm.engine.run([first]))
    learned = first.policy.ahead.mean
    assert learned != unlearned
    second.policy.more(0)
    assert second.policy.ahead.mean == learned
    elsewhere.policy.more(0)  # of another drafter
    assert elsewhere.policy.ahead.mean == unlearned


@pytest.mark.parametrize("options", [{"temperature": 0.7}, {"repetition_penalty": 1.2}])
def test_what_is_not_plain_has_costs_and_a_memory_of_its_own(target: BlockTarget, options: dict[str, Any]) -> None:
    llm = LLM(target, drafter := LayerSkip(target), POLICIES.parse("pace"))
    for plain, wider in ((True, 1.01), (False, 1.02)):
        set_costs(drafter, Costs({0: 1.0, 8: wider}), plain)

    def asked(**options: Any) -> Request:
        [request] = llm.requests([[5, 6, 7]], max_new_tokens=12, **options)
        return request

    for first, others, wider in ((options, {}, 1.02), ({}, options, 1.01)):
        request = asked(**first)
        assert request.plain == (not first)
        assert request.policy.long_run.cost(8) == pytest.approx(wider)
        list(llm.engine.run([request]))
        later, another = asked(**first), asked(**others)
        for one in (later, another):
            one.policy.more(0)
        assert later.policy.ahead.mean == request.policy.ahead.mean != another.policy.ahead.mean


def test_engines_tell_costs_apart(target: BlockTarget) -> None:
    seen: list[str] = []

    class Noted(Costs):
        def __init__(self, name: str) -> None:
            super().__init__({0: 1.0, 8: 2.0})
            self.name = name

        def observe(self, *_: Any, **__: Any) -> None:
            seen.append(self.name)

    llm = LLM(target, drafter := LayerSkip(target), POLICIES.parse("fixed:k=2"))
    for plain, name in ((True, "plain"), (False, "others")):
        set_costs(drafter, Noted(name), plain)
    llm.generate([5, 6, 7], max_new_tokens=3)
    assert set(seen) == {"plain"}
    llm.generate([5, 6, 7], max_new_tokens=3, temperature=1.0)
    assert set(seen) == {"plain", "others"}


def test_costs_of_rounds_that_sample_start_from_the_others(target: BlockTarget) -> None:
    """They are asked for while others decode with the drafter, where nothing can be measured."""
    drafter = LayerSkip(target)
    set_costs(drafter, plain := LearnedCosts({0: 1.0, 1: 1.2, 8: 2.0}))
    before = [plain(drafted) for drafted in (0, 1, 8)]
    costs = round_seconds(drafter, plain=False)
    assert [costs(drafted) for drafted in (0, 1, 8)] == pytest.approx(before, rel=0.1)
    for _ in range(40):
        for drafted, seconds in ((0, 1.0), (1, 2.0), (8, 3.0)):
            costs.observe(drafted, seconds)
    assert costs(1) / costs(0) == pytest.approx(2.0, rel=0.1)
    assert [plain(drafted) for drafted in (0, 1, 8)] == before


def test_measuring_teaches_nothing() -> None:
    """Its text is none that anybody would write."""
    model = small_llama()
    drafter = Medusa(as_target(model), head=MedusaHead.from_target(model, heads=2), tree="dynamic")
    round_cost(drafter)
    assert drafter.calibration.kept() == []


def test_costs_of_a_batch(target: BlockTarget) -> None:
    """A further token of each of eight requests makes the pass wider by eight."""
    drafter = LayerSkip(target)
    set_costs(drafter, Costs({0: 0.010, 1: 0.012, 4: 0.018}))
    alone = pass_cost(drafter)(1)
    drafter.sharing = 8
    passes = Costs({1: 0.010, 5: 0.014, 16: 0.1})
    assert alone == pytest.approx(1.1)
    assert pass_cost(drafter)(1) == pytest.approx(1 + (passes(16) - passes(8)) / passes(8))
    assert round_cost(drafter)(1) == pytest.approx((0.001 + passes(16)) / passes(8))


def test_what_policies_hand_on_keeps_no_drafter(target: BlockTarget) -> None:
    """Nor, with it, its target."""
    made = DraftModel(target, model=BlockTarget(small_llama()))
    request = Request([1, 2, 3], limit=20, policy=ready(Pace(), made), seed=0)
    for _ in Engine(target, made).run([request]):
        pass
    known = weakref.ref(made)
    del made, request
    gc.collect()
    assert known() is None
