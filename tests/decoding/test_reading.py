"""How a prompt is read where a pass takes less if nobody wants its last hidden states."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import one_thread  # noqa: F401
from paceline.decoding import reading
from paceline.decoding.reading import Reading
from paceline.decoding.request import Request
from paceline.drafting.stepping.forward import ALONG, TAIL
from paceline.policies.fixed import Fixed
from paceline.targets.reference import BlockTarget
from tiny import small_llama


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> BlockTarget:
    for name, value in (("LONG", 8), ("TAIL", 3), ("PREFILL_CHUNK", 10)):
        monkeypatch.setattr(reading, name, value)
    return BlockTarget(small_llama())


def read(target: BlockTarget, tokens: int, kept: Collection[int], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What passes there were (tokens, and what was tapped), and the states that the drafter is given."""
    passes = []

    def prefill(ids: list[int], cache: object, taps: Collection[int]) -> dict[int, Tensor]:
        passes.append((len(ids), set(taps)))
        return BlockTarget.prefill(target, ids, cache, taps)

    monkeypatch.setattr(target, "prefill", prefill)
    request = Request([3 + i % 50 for i in range(tokens + 1)], limit=4, policy=Fixed())
    some = Reading(target, request, 0, target.new_cache(1, tokens + 8), {1, target.num_layers}, kept, None)
    while some.left:
        some.read()
    return passes, some.hidden()


@pytest.mark.parametrize(("tokens", "sizes"), [(7, [7]), (8, [5, 3]), (13, [10, 3]), (14, [10, 4]), (25, [10, 10, 5])])
def test_last_states_of_the_last_tokens_only(
    target: BlockTarget, tokens: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    last = target.num_layers
    _, whole = read(target, tokens, {1}, monkeypatch)
    target.ends_early = True
    passes, hidden = read(target, tokens, {1}, monkeypatch)
    assert passes == [(size, {1}) for size in sizes[:-1]] + [(sizes[-1], {1, last})]
    torch.testing.assert_close(hidden[1], whole[1])
    torch.testing.assert_close(hidden[last], whole[last][-sizes[-1] :])


def test_enough_of_them_for_an_eagle_head() -> None:
    assert TAIL + ALONG <= reading.TAIL <= reading.LONG


def test_where_all_of_them_are_wanted(target: BlockTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    target.ends_early = True
    passes, hidden = read(target, 25, {1, target.num_layers}, monkeypatch)
    assert passes == [(size, {1, target.num_layers}) for size in (10, 10, 5)]
    assert len(hidden[target.num_layers]) == 25
