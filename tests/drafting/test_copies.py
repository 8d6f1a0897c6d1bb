"""Copies of repeated text, and drafters that take them before, or in place of, tokens of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import hf_greedy, one_thread, perturbed  # noqa: F401
from paceline.decoding.engine import Engine
from paceline.decoding.request import Request
from paceline.drafters.eagle.drafter import Eagle
from paceline.drafters.eagle.head import EagleHead
from paceline.drafters.early_exit.drafter import EarlyExit
from paceline.drafters.early_exit.head import ExitHead
from paceline.drafters.layer_skip.drafter import LayerSkip
from paceline.drafters.medusa.drafter import Medusa
from paceline.drafters.medusa.head import MedusaHead
from paceline.drafting.autoregressive import COPY, SURE, AutoregressiveDrafter, Step
from paceline.drafting.base import Row
from paceline.drafting.copies import CHANCES, LONGEST, Copies, Rates
from paceline.drafting.tree import TokenTree
from paceline.errors import OptionError
from paceline.policies.base import StoppingPolicy
from paceline.policies.fixed import Fixed
from paceline.policies.pace import Pace
from paceline.policies.sureness import Sureness
from paceline.targets.reference import BlockTarget
from paceline.targets.target import Target
from tiny import small_llama

AGAIN = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7]  # 8 and 9 come next, surely
NEVER = list(range(20, 36))


# -- what a text says ----------------------------------------------------------------------------------------------
@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.lists(st.integers(0, 3), max_size=4))
def test_the_longest_match_of_the_latest_place_is_followed(ids: list[int], drafted: list[int]) -> None:
    text = [*ids, *drafted]
    copy = Copies(ids, rates := Rates()).after(ids, drafted)
    for matched in range(min(LONGEST, len(text) - 1), 0, -1):
        ends = [end for end in range(matched, len(ids)) if ids[end - matched : end] == text[-matched:]]
        if ends:
            assert copy is not None
            assert (copy.token, copy.chance) == (ids[ends[-1]], rates.of_copy(matched))
            return
    assert copy is None


def test_it_learns_of_the_output_how_often_copies_are_right() -> None:
    rates = Rates()
    Copies([1, 2, 1, 3, 1, 4] * 3, rates)
    assert [rates.of_copy(matched) for matched in range(1, LONGEST + 1)] == pytest.approx(CHANCES)  # not of the prompt
    text = [1, 2, 9]
    copies = Copies(text, rates)
    for token in (1, 2, 9, 1, 2, 9):
        text.append(token)
        copies.read(text)
    assert rates.of_copy(1) > CHANCES[0]  # 1 stood there before, and 2 followed again
    assert rates.of_copy(2) > CHANCES[1]
    wrong = Rates()
    text = [5, 6, 7]
    copies = Copies(text, wrong)
    for token in (5, 8, 5, 9):
        text.append(token)
        copies.read(text)
    assert wrong.of_copy(1) < CHANCES[0]


def test_it_learns_how_often_the_drafters_own_tokens_are_right() -> None:
    rates = Rates()
    before = rates.of_own(0.5)
    assert before == pytest.approx(0.5)
    text = [1, 2, 3]
    copies = Copies(text, rates)
    copies.drafted(3, 4, 0.5)
    copies.drafted(4, 5, 0.5)  # what comes after a wrong token says nothing
    text += [9]
    copies.read(text)
    once = rates.of_own(0.5)
    assert once < before
    copies.drafted(4, 7, 0.5)
    copies.drafted(5, 8, 0.5)
    text += [7, 8, 6]
    copies.read(text)
    assert rates.of_own(0.5) > once
    learned = rates.of_own(0.5)
    copies.read(text)  # nothing is learned twice
    copies.drafted(6, 5, float("nan"))  # nor of what is no number
    text += [5]
    copies.read(text)
    assert rates.of_own(0.5) == learned


# -- drafters that copy --------------------------------------------------------------------------------------------
class Counting(AutoregressiveDrafter):
    """Always proposes token 0, with the probability that it is told."""

    source = "counting"

    def __init__(self, target: Target, top: float, copy: bool | str = "auto") -> None:
        super().__init__(target, copy=copy)
        self.logits = torch.zeros(target.vocab_size, dtype=torch.float64)
        self.logits[0] = torch.tensor(top * (target.vocab_size - 1) / (1 - top)).log()

    def step(self, rows: Sequence[Row], trees: Sequence[TokenTree], depth: int) -> Step:
        return Step(self.logits.expand(len(rows), -1))


@pytest.fixture(scope="module")
def target() -> BlockTarget:
    return BlockTarget(small_llama())


def drafted(drafter: AutoregressiveDrafter, ids: list[int], policy: StoppingPolicy) -> TokenTree:
    request = Request(ids, limit=20, policy=policy)
    [tree] = drafter.draft([request])
    return tree


def test_what_is_sure_takes_no_forward(target: BlockTarget) -> None:
    drafter = Counting(target, top=0.3, copy=True)
    tree = drafted(drafter, AGAIN, Fixed(k=4))
    assert tree.tokens[1:] == [8, 9, 1, 2]
    assert tree.sources[1:] == [COPY] * 4
    assert tree.q == [None] * 5
    assert drafter.forwards == 0


def test_what_is_not_sure_competes_with_the_drafters_own_token(target: BlockTarget) -> None:
    text = [1, 2, 7, 3, 1, 2]  # two tokens match: a chance of a half
    assert 0.3 < CHANCES[1] < 0.7 < SURE
    assert drafted(Counting(target, top=0.3, copy=True), text, Fixed(k=1)).tokens[1:] == [7]
    assert drafted(Counting(target, top=0.7, copy=True), text, Fixed(k=1)).tokens[1:] == [0]
    assert drafted(Counting(target, top=0.3, copy=True), NEVER, Fixed(k=2)).tokens[1:] == [0, 0]


def test_a_drafter_copies_where_it_was_told_to_or_the_policy_wants_it(target: BlockTarget) -> None:
    """Policies of papers get the papers' drafters, unless somebody asks for more."""

    def copies(copy: bool | str, policy: StoppingPolicy) -> bool:
        return drafted(Counting(target, 0.3, copy), AGAIN, policy).sources[1] == COPY

    assert copies("auto", Pace())
    assert not copies("auto", Fixed(k=2))
    assert copies(True, Fixed(k=2))
    assert not copies(False, Pace())


def test_what_must_match_something_is_not_copied(target: BlockTarget) -> None:
    request = Request(AGAIN, limit=20, policy=Fixed(k=2))
    request.constraint = object()  # type: ignore[assignment]
    assert not Counting(target, 0.3, copy=True).copies(request)


def test_the_policy_decides_how_far(target: BlockTarget) -> None:
    class Takes(Fixed):
        def takes(self, sure: Sureness, depth: int) -> bool:
            assert sure.top >= 0.5
            return depth < 3

    assert drafted(Counting(target, 0.3, copy=True), AGAIN, Takes(k=9)).tokens[1:] == [8, 9, 1]
    assert drafted(Counting(target, 0.3, copy=True), AGAIN, Fixed(k=0)).tokens == [7]


def test_wrong_options(target: BlockTarget) -> None:
    with pytest.raises(OptionError, match="copy is true, false or auto, not 'yes'"):
        Counting(target, 0.3, copy="yes")
    with pytest.raises(OptionError, match="chains copy, trees do not"):
        Eagle(target, head=EagleHead.from_target(small_llama(), 1), tree=2, copy=True)


MAKE: dict[str, Callable[[Target], AutoregressiveDrafter]] = {
    "eagle": lambda target: Eagle(target, head=perturbed(EagleHead.from_target(small_llama(), 1), 0.05), copy=True),
    "early-exit": lambda target: EarlyExit(
        target, head=perturbed(ExitHead.from_target(small_llama(), 1, exit_layers=2), 0.05), copy=True
    ),
    "layer-skip": lambda target: LayerSkip(target, copy=True),
    "medusa": lambda target: Medusa(
        target, head=perturbed(MedusaHead.from_target(small_llama(), heads=2), 0.05), copy=True
    ),
}


@pytest.mark.parametrize("policy", [lambda: Fixed(k=5), Pace])
@pytest.mark.parametrize("name", MAKE)
def test_output_is_plain_decodings(target: BlockTarget, name: str, policy: Callable[[], StoppingPolicy]) -> None:
    """Of requests of a batch some copy while others draft."""
    prompts = [AGAIN, [100], [1, 2, 3, 4] * 5, [42, 43]]
    requests = [Request(prompt, limit=40, policy=policy()) for prompt in prompts]
    for _ in Engine(target, MAKE[name](target)).run(requests, batch=3):
        pass
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output == hf_greedy(target.model, prompt, 40)
    if isinstance(requests[0].policy, Fixed):  # the other decides by what it takes on this machine
        assert COPY in {source for request in requests for source in request.stats.sources}
