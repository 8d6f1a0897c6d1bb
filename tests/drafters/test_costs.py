"""What one more drafted token costs."""

from __future__ import annotations

import pytest

from helpers import one_thread  # noqa: F401
from paceline.api import LLM
from paceline.drafters.costs import Costs, set_costs, step_cost
from paceline.drafters.layer_skip import LayerSkip
from paceline.drafters.prompt_lookup import PromptLookup
from paceline.policies import POLICIES
from paceline.targets.target import BlockTarget
from tiny import small_llama


@pytest.fixture(scope="module")
def target() -> BlockTarget:
    target = BlockTarget(small_llama())
    set_costs(target, Costs({1: 0.010, 5: 0.014, 16: 0.1}))
    return target


def test_without_a_model_it_is_the_wider_pass(target: BlockTarget) -> None:
    assert step_cost(PromptLookup(target)) == pytest.approx(0.1)


def test_with_one_it_is_its_forward_as_well(target: BlockTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = LayerSkip(target)
    first = step_cost(drafter)
    assert first > 0.1
    monkeypatch.setattr(drafter, "step", None)
    assert step_cost(drafter) == first  # measured once


def test_policies_that_ask(target: BlockTarget) -> None:
    """Decoding goes on as if nothing had been measured in between."""
    drafter = LayerSkip(target)
    plain = LLM(target, drafter, POLICIES.parse("fixed:k=0")).generate([5, 6, 7], max_new_tokens=12)
    for policy in ("beta-ts:cost=auto", "cali-ts:cost=auto"):
        llm = LLM(target, drafter, POLICIES.parse(policy))
        [request] = llm.requests([[5, 6, 7]], max_new_tokens=12)
        for _ in llm.engine.run([request]):
            pass
        assert request.output == plain.tokens
        assert request.policy.cost == step_cost(drafter)
