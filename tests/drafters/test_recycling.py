"""Token recycling: what it keeps of a pass, and that it keeps nothing while drafting does not pay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers import one_thread  # noqa: F401
from paceline.api import LLM
from paceline.drafters.recycling import Recycling
from paceline.drafting.pause import Pause
from paceline.policies import POLICIES
from paceline.targets.cost_model import Costs
from paceline.targets.costs import set_costs
from paceline.targets.reference import BlockTarget
from tiny import small_llama


@pytest.fixture
def llm() -> LLM:
    target = BlockTarget(small_llama())
    set_costs(target, Costs({1: 1.0, 64: 1.5}))
    return LLM(target, Recycling(target, top=3), POLICIES.parse("fixed:k=6"))


def test_it_keeps_the_runners_up_of_every_token_read(llm: LLM) -> None:
    [request] = llm.requests([[5, 6, 7]], max_new_tokens=1, eos=())
    kept: dict[int, list[int]] = {}
    forget, llm.drafter.forget = llm.drafter.forget, lambda row, memory: kept.update(memory)  # type: ignore[method-assign]
    list(llm.engine.run([request]))
    llm.drafter.forget = forget  # type: ignore[method-assign]
    logits = llm.target.model(torch.tensor([[5, 6, 7]])).logits[0, -1]
    assert kept == {7: logits.topk(3).indices.tolist()}


def test_it_keeps_nothing_while_it_pauses(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says so to the one who decides about pauses."""
    learned: list[int] = []
    told: list[float] = []
    learn, rounds = Recycling.learn, iter(range(99))
    monkeypatch.setattr(
        Recycling, "learn", lambda self, row, *rest: (learned.append(len(row.ids)), learn(self, row, *rest))[1]
    )
    monkeypatch.setattr(Pause, "pauses", lambda *_: next(rounds) % 3 == 2)
    monkeypatch.setattr(Pause, "learn", lambda self, rows, gain, rate, seconds, sampling: told.append(seconds))
    clock = iter(range(10_000))
    monkeypatch.setattr("paceline.drafting.tree_drafter.now", lambda: float(next(clock)))
    output: Any = llm.generate([5, 6, 7], max_new_tokens=20, eos=())
    pauses = len(output.stats.rounds) // 3
    assert pauses > 1
    assert len(learned) == len(output.stats.rounds) - pauses
    assert told[0] == 1.0  # nothing was learned before the first draft
    assert told[1:3] == [2.0, 2.0]  # a tick for drafting and one for learning, however long it was ago
