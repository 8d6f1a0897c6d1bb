"""Any order of adding, stepping and cancelling gives every request that ends what it gives alone, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline
from drafters.test_dflash import noisy as dflash_head
from drafters.test_eagle3 import noisy as eagle3_head
from drafters.test_eagle_head import noisy as eagle_head
from helpers import one_thread, perturbed  # noqa: F401
from paceline import LLM
from paceline.decoding import batch, reading
from paceline.decoding.engine import Engine
from paceline.decoding.prefixes import PrefixStore
from paceline.decoding.request import Request
from paceline.drafters.dflash.drafter import DFlash
from paceline.drafters.dispatch import Dispatch
from paceline.drafters.draft_model import DraftModel
from paceline.drafters.eagle.drafter import Eagle
from paceline.drafters.early_exit.drafter import EarlyExit
from paceline.drafters.early_exit.head import ExitHead
from paceline.drafters.medusa.drafter import Medusa
from paceline.drafters.medusa.head import MedusaHead
from paceline.drafting.base import Drafter
from paceline.targets.linear import can_pack
from paceline.targets.target import Target
from tiny import byte_tokenizer, small_llama

pytestmark = pytest.mark.skipif(not can_pack(), reason="no oneDNN: nothing is exact")

DRAFTERS: dict[str, str | Callable[[Target], Drafter]] = {
    "none": "none",
    "prompt-lookup": "prompt-lookup",
    "trigram": "trigram:budget=6",
    "draft-model": lambda target: DraftModel(target, model=exact(perturbed(small_llama(), 0.05).float())),
    "early-exit": lambda target: EarlyExit(
        target, head=perturbed(ExitHead.from_target(small_llama().float(), 1, exit_layers=2), 0.05)
    ),
    "medusa": lambda target: Medusa(
        target, head=perturbed(MedusaHead.from_target(small_llama().float(), heads=3), 0.05), tree="dynamic", budget=6
    ),
    "dflash": lambda target: DFlash(target, head=dflash_head(small_llama().float())),
    "dflash in a tree": lambda target: DFlash(
        target, head=dflash_head(small_llama().float()), tree="dynamic", budget=6
    ),
    "eagle": lambda target: Eagle(target, head=eagle_head(small_llama().float(), 1)),
    "eagle-3": lambda target: Eagle(target, head=eagle3_head(small_llama().float(), 1, tokens=range(200)), extra=9),
    "merge": "merge:drafters=suffix|recycling:budget=6",
    "draft-model that copies": lambda target: DraftModel(
        target, model=exact(perturbed(small_llama(), 0.05).float()), copy=True
    ),
    "eagle that copies": lambda target: Eagle(target, head=eagle_head(small_llama().float(), 1), copy=True),
    "early-exit that copies": lambda target: EarlyExit(
        target, head=perturbed(ExitHead.from_target(small_llama().float(), 1, exit_layers=2), 0.05), copy=True
    ),
}
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [100], [1, 2, 3, 4] * 5, [42, 43]]
ROWS, SLOTS = 3, 64


class Kind(NamedTuple):
    """What is asked for: one of the prompts, greedily or sampled, so many tokens of it."""

    prompt: int
    limit: int
    temperature: float
    seed: int


KINDS = st.builds(
    Kind,
    st.sampled_from(range(len(PROMPTS))),
    st.sampled_from([1, 6, 12]),
    st.sampled_from([0.0, 0.9]),
    st.integers(0, 2),
)
#: Add a request, step, or cancel one of those that were added.
ACTIONS = st.lists(st.one_of(KINDS, st.just("step"), st.just("step"), st.integers(0, 9)), min_size=4, max_size=24)


def exact(model: object) -> Target:
    """On the tier that promises the same bits whatever the pass."""
    llm = paceline.load(model, tokenizer=byte_tokenizer(), tier="torch", exact=True, drafter="none")  # type: ignore[arg-type]
    return llm.target


@cache
def loaded(drafter: str) -> LLM:
    made = DRAFTERS[drafter]
    return paceline.load(
        small_llama().float(), tier="torch", exact=True, tokenizer=byte_tokenizer(), drafter=made, policy="fixed:k=3"
    )


def ask(llm: LLM, kind: Kind) -> Request:
    sampling = {"max_new_tokens": kind.limit, "temperature": kind.temperature, "seed": kind.seed, "eos": ()}
    [request] = llm.requests([PROMPTS[kind.prompt]], **sampling)
    return request


@cache
def alone(drafter: str, kind: Kind) -> tuple[list[int], str]:
    """Its tokens and its text."""
    llm = loaded(drafter)
    request = ask(llm, kind)
    text = "".join(piece.text for _ in llm.engine.run([request]) for piece in request.read())
    return request.output, text


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "growing"])
@pytest.mark.parametrize("drafter", list(DRAFTERS))
@settings(max_examples=15)
@given(actions=ACTIONS)
def test_each_gets_what_it_gets_alone(drafter: str, fixed: bool, actions: list[Kind | str | int]) -> None:
    llm = loaded(drafter)
    engine = Engine(llm.target, llm.drafter, **({"rows": ROWS, "slots": SLOTS} if fixed else {}))
    asked: list[tuple[Kind, Request]] = []
    emitted: dict[Request, list[int]] = {}

    def step() -> None:
        for request, tokens in engine.step():
            emitted.setdefault(request, []).extend(tokens)

    for action in actions:
        if isinstance(action, Kind):
            asked.append((action, ask(llm, action)))
            engine.add(asked[-1][1])
        elif isinstance(action, int):
            for _, request in asked[action : action + 1]:
                engine.cancel(request)
        else:
            step()
    while not engine.idle:
        step()
    for kind, request in asked:
        tokens, text = alone(drafter, kind)
        assert request.output == emitted.get(request, [])
        if request.finish_reason == "cancelled":
            assert request.output == tokens[: len(request.output)]
        else:
            assert request.finish_reason == "length"
            assert request.output == tokens
            assert "".join(piece.text for piece in request.read()) == text


CHUNK = 4  # of prompts here, instead of the hundreds of tokens that one of a real model's has
OTHERS = ("none", "draft-model", "medusa", "merge")


@cache
def mixed(first: str) -> Dispatch:
    llm = loaded(first)
    return Dispatch(llm.target, {first: llm.drafter} | {name: llm.method(DRAFTERS[name]).drafter for name in OTHERS})


@pytest.mark.parametrize("first", ["early-exit", "eagle", "prompt-lookup"])
@settings(max_examples=12)
@given(actions=ACTIONS, drafters=st.lists(st.sampled_from([None, *OTHERS]), min_size=24, max_size=24))
def test_drafters_side_by_side(first: str, actions: list[Kind | str | int], drafters: list[str | None]) -> None:
    """Each with a drafter of its own, some with a prediction, prompts read by chunks, prefixes reused: all as alone."""
    llm = loaded(first)
    engine = Engine(llm.target, mixed(first), rows=ROWS, slots=SLOTS, prefixes=PrefixStore(100))
    asked: list[tuple[Kind, Request]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "PREFILL_CHUNK", CHUNK)
        patch.setattr(reading, "PREFILL_CHUNK", CHUNK)
        for action, drafter in zip(actions, drafters, strict=False):
            if isinstance(action, Kind):
                request = ask(llm, action)
                request.drafter, request.verifier = drafter, "match"
                request.prediction = [*alone("none", action)[0][: 3 * action.seed], 7, 7] if action.seed else []
                asked.append((action, request))
                engine.add(request)
            elif isinstance(action, int):
                for _, request in asked[action : action + 1]:
                    engine.cancel(request)
            else:
                engine.step()
        while not engine.idle:
            engine.step()
    for kind, request in asked:
        tokens, _ = alone("none", kind)
        assert request.error is None
        assert request.finish_reason in ("length", "cancelled")
        assert request.output == (tokens if request.finish_reason == "length" else tokens[: len(request.output)])
    assert all(not desk.seats for desk in mixed(first).desks.values())
