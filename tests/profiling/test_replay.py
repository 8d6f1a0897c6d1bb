"""Replays against the rounds of the engine itself."""

from __future__ import annotations

import pytest

import paceline
from helpers import one_thread, perturbed  # noqa: F401
from paceline.drafters.draft_model import DraftModel
from paceline.drafters.early_exit.drafter import EarlyExit
from paceline.drafters.early_exit.head import ExitHead
from paceline.drafters.layer_skip.drafter import LayerSkip
from paceline.drafters.merge import Merge
from paceline.drafters.suffix import Suffix
from paceline.drafting.base import Drafter
from paceline.errors import OptionError
from paceline.policies import POLICIES
from paceline.policies.fixed import Fixed
from paceline.profiling.replay import replay
from paceline.targets.reference import BlockTarget
from paceline.targets.target import Target
from tiny import byte_tokenizer, small_llama

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]


@pytest.mark.parametrize(
    "drafter", ["none", "suffix:budget=4", "prompt-lookup:branches=2:budget=8", "trigram:budget=9"]
)
@pytest.mark.parametrize("new", [1, 2, 40])
def test_same_rounds_as_with_the_model(drafter: str, new: int) -> None:
    llm = paceline.load(small_llama(), tokenizer=byte_tokenizer(), drafter=drafter, policy="fixed:k=5")
    output = llm.generate(PROMPT, max_new_tokens=new, eos=())
    stats = replay(llm.drafter, PROMPT, output.tokens, Fixed(k=5))
    rounds = [[(r.drafted, r.depth, r.accepted, r.emitted) for r in found.rounds] for found in (stats, output.stats)]
    assert rounds[0] == rounds[1]
    assert stats.sources == output.stats.sources
    assert stats.tokens == new


def test_automatic_budgets() -> None:
    llm = paceline.load(small_llama(), tokenizer=byte_tokenizer(), drafter="suffix")
    stats = replay(llm.drafter, PROMPT, PROMPT * 20, Fixed(k=5))
    assert stats.tokens == 160
    assert stats.tau > 1


def early_exit(target: Target) -> EarlyExit:
    head = ExitHead.from_target(small_llama(), 1, exit_layers=2)
    return EarlyExit(target, head=perturbed(head, 0.05))


MODELS = {
    "early-exit": early_exit,
    "draft-model": lambda target: DraftModel(
        target, model=BlockTarget(perturbed(small_llama(), 0.05), byte_tokenizer())
    ),
    "layer-skip": LayerSkip,
    "merge": lambda target: Merge(target, drafters=[Suffix(target, budget=4), early_exit(target)], budget=4),
}


@pytest.mark.parametrize("policy", ["fixed:k=4", "beta-ts", "cali-ts"])
@pytest.mark.parametrize("drafter", list(MODELS))
def test_with_the_model(drafter: str, policy: str) -> None:
    """Drafters that read the target replay along with it: the rounds that made the text come again."""
    llm = paceline.load(small_llama(), tokenizer=byte_tokenizer(), drafter=MODELS[drafter], policy=policy)
    output = llm.generate(PROMPT, max_new_tokens=20, eos=(), seed=3)
    rule = POLICIES.parse(policy).build()
    stats = replay(llm.drafter, PROMPT, output.tokens, rule, target=llm.target, seed=3)
    rounds = [[(r.drafted, r.depth, r.accepted, r.emitted) for r in found.rounds] for found in (stats, output.stats)]
    assert rounds[0] == rounds[1]
    assert stats.accepted > 0


@pytest.mark.parametrize("drafter", ["recycling", "lookahead:budget=16", *MODELS])
def test_needs_the_model(drafter: str) -> None:
    made: str | Drafter = MODELS.get(drafter, drafter)
    llm = paceline.load(small_llama(), tokenizer=byte_tokenizer(), drafter=made)
    with pytest.raises(OptionError, match="with the target only"):
        replay(llm.drafter, PROMPT, PROMPT, Fixed(k=9))


def test_policies_are_told_where_they_run() -> None:
    llm = paceline.load(small_llama(), tokenizer=byte_tokenizer(), drafter="suffix:budget=4")
    stats = replay(llm.drafter, PROMPT, PROMPT * 5, POLICIES.parse("beta-ts:cost=auto").build())
    assert stats.tau > 1  # the measured cost is a number by now
    with pytest.raises(OptionError, match="needs a predictor"):
        replay(llm.drafter, PROMPT, PROMPT, POLICIES.parse("disco").build())
