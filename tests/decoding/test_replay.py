"""Replays against the rounds of the engine itself."""

from __future__ import annotations

import pytest

import paceline
from helpers import one_thread  # noqa: F401
from paceline.decoding.replay import replay
from paceline.errors import OptionError
from paceline.policies.fixed import Fixed
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


@pytest.mark.parametrize("drafter", ["recycling", "lookahead:budget=16"])
def test_needs_the_model(drafter: str) -> None:
    llm = paceline.load(small_llama(), tokenizer=byte_tokenizer(), drafter=drafter)
    with pytest.raises(OptionError, match="logits"):
        replay(llm.drafter, PROMPT, PROMPT, Fixed(k=9))
