"""Memories of several requests: bounded, for those who ask for them, and without an effect on the output."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline
from helpers import hf_greedy, one_thread  # noqa: F401
from paceline.drafters.merge import Merge
from paceline.drafters.none import NoDrafter
from paceline.drafting.shared_texts import END, LONGEST, SharedTexts
from paceline.errors import OptionError
from tiny import byte_tokenizer, small_llama

PROMPT = [5, 9, 3, 40, 77]


def drafted(drafter: str) -> list[int]:
    """Accepted tokens of the same request, three times in a row."""
    llm = paceline.load(small_llama(), tokenizer=byte_tokenizer(), drafter=drafter, policy="fixed:k=6")
    wanted = hf_greedy(llm.target.model, PROMPT, 24)
    outputs = [llm.generate(PROMPT, max_new_tokens=24, eos=()) for _ in range(3)]
    assert all(output.tokens == wanted for output in outputs)
    return [output.stats.accepted for output in outputs]


@pytest.mark.parametrize("drafter", ["suffix:budget=6", "recycling:budget=12"])
def test_isolated_unless_asked_for(drafter: str) -> None:
    alone, together = drafted(drafter), drafted(f"{drafter}:share=process")
    assert alone == [alone[0]] * 3
    assert together[0] == alone[0]
    assert together[2] >= together[1] > alone[1]


def test_auto_shares() -> None:
    llm = paceline.load(small_llama(), drafter="auto:head=none", share="process")
    assert isinstance(llm.drafter, Merge)
    assert {part.source for part in llm.drafter.parts} == {"trigram", "suffix", "recycling"}
    before = llm.generate(PROMPT, max_new_tokens=24, eos=())
    again = llm.generate(PROMPT, max_new_tokens=24, eos=())
    assert again.tokens == before.tokens
    assert len(again.stats.rounds) < len(before.stats.rounds)


@pytest.mark.parametrize(
    ("drafter", "part"),
    [("suffix:share=all", "share is request or process"), ("recycling:share=x", "share is request or process")],
)
def test_options(drafter: str, part: str) -> None:
    with pytest.raises(OptionError, match=part):
        paceline.load(small_llama(), drafter=drafter)


def test_without_a_memory_to_share() -> None:
    with pytest.raises(OptionError, match="lookahead has no memory"):
        paceline.load(small_llama(), drafter="lookahead+fixed:k=2", share="process")
    with pytest.raises(OptionError, match="that are named"):
        paceline.load(small_llama(), drafter=NoDrafter, share="process")
    llm = paceline.load(small_llama(), drafter="suffix+fixed:k=2", share="process")
    assert llm.policy.text == "fixed:k=2"


@given(st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_the_latest_match_within_a_text(texts: list[list[int]], context: list[int]) -> None:
    memory = SharedTexts(2, most=50)
    for text in texts:
        memory.add(text)
        assert len(memory.tokens) <= 50 + 26
    matched, at = memory.longest(context)
    if matched:
        assert 2 <= matched <= LONGEST
        assert memory.tokens[at - matched : at] == context[-matched:]
    else:
        # Those that something follows.
        grams = {(a, b) for a, b, after in zip(*(memory.tokens[i:] for i in range(3)), strict=False) if after != END}
        assert len(context) < 2 or tuple(context[-2:]) not in grams
    found = memory.after(at, 5) if matched else []
    assert END not in found
    assert memory.tokens[at : at + len(found)] == found


def test_old_texts_are_forgotten() -> None:
    memory = SharedTexts(2)
    memory.add([1, 2, 3, 4, 5])
    memory.add([1, 2, 3])  # a later text that ends there says nothing of what follows
    assert memory.after(memory.longest([9, 2, 3])[1], 2) == [4, 5]
    memory = SharedTexts(2, most=20)
    memory.add([1, 2, 3])
    assert memory.longest([0, 1, 2]) == (2, 2)
    for _ in range(6):
        memory.add([7, 8, 9, 7])
    assert memory.longest([0, 1, 2]) == (0, 0)
    assert memory.longest([8, 9])[0] == 2
    assert len(memory.tokens) <= 20
