"""Guides inside vLLM, held against a stand-in for its model: which states they are told, and what they need of it."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drafters.test_guide import drawn_guide
from integrations.test_vllm import Request, Runner, config
from paceline.drafters.trigram.lookup import Memory, TrigramLookup
from paceline.errors import CheckpointMismatch, OptionError, PacelineError
from paceline.integrations.vllm import Proposer, proposer
from paceline.integrations.vllm.rounds import Rounds
from paceline.integrations.vllm.states import States
from paceline.targets.native import available
from tiny import small_llama

pytestmark = pytest.mark.skipif(not available(), reason="needs a C++ compiler with OpenMP")

METHOD = "trigram:matrix=none:budget=4:guide={}+fixed:k=4"
TEXT = [5, 9, 2, 7, 5, 9, 3, 1, 5, 9, 2, 2]


class OutputLayer(nn.Module):
    """vLLM's `LogitsProcessor`, as far as it matters."""

    scale = 1.0

    def forward(self, lm_head: nn.Linear, hidden_states: Tensor) -> Tensor:
        return functional.linear(hidden_states, lm_head.weight)


class Model(nn.Module):
    """A Llama as vLLM has it."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        llama = small_llama(0, **sizes).float()
        self.model, self.lm_head, self.logits_processor = llama.model, llama.lm_head, OutputLayer()
        drawn = torch.Generator().manual_seed(3)
        self.model.norm.weight.data.uniform_(0.5, 2.0, generator=drawn)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.logits_processor(self.lm_head, hidden)
        return found


def states(*shape: int) -> Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(7))


def unit(state: Tensor) -> Tensor:
    """Of root mean square 1."""
    return functional.rms_norm(state, state.shape[-1:])


@pytest.mark.parametrize("named", [False, True])
def test_the_state_that_told_the_last_accepted_token(named: bool) -> None:
    model = Model()
    read, layers = States(model), states(7, 32)
    normed = model.model.norm(layers)
    if named:
        model.logits_processor(model.lm_head, hidden_states=normed)
    else:
        model.compute_logits(normed)
    found = read.of([1, 4, 2], [0, 2, 0])
    assert found is not None
    torch.testing.assert_close(found, unit(layers[[0, 3, 5]]), rtol=1e-4, atol=1e-4)
    assert read.of([1, 4, 2], [0, 2, 0]) is None  # those of an earlier step


def test_states_of_other_tokens_are_not_taken() -> None:
    model = Model()
    read = States(model)
    model.compute_logits(states(6, 32))
    assert read.of([1, 4, 2], [0, 2, 0]) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: setattr(model.model, "norm", nn.LayerNorm(32)), "root mean square"),
        (lambda model: delattr(model.model, "norm"), "has no 'model.norm'"),
        (lambda model: delattr(model, "logits_processor"), "has no 'logits_processor'"),
        (lambda model: setattr(model, "lm_head", nn.Identity()), "rows of 'lm_head'"),
    ],
)
def test_models_that_show_no_states(change: Any, message: str) -> None:
    model = Model()
    change(model)
    with pytest.raises(OptionError, match=message):
        States(model)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    drawn_guide(small_llama(0).float()).save(tmp_path)
    return tmp_path


def loaded(monkeypatch: pytest.MonkeyPatch, method: str, model: Model, **setting: Any) -> Proposer:
    monkeypatch.setattr(proposer, "version", lambda name: "0.32.0")
    monkeypatch.setattr(proposer, "mend_sampling", lambda: False)
    made = Proposer(config({"paceline": {"method": method}}, **setting))
    made.load_model(model)
    return made


class Watched(Runner):
    """Has a model's output layer read random states, as vLLM's runner does before it asks for drafts."""

    def __init__(self, rounds: Rounds, model: Model) -> None:
        super().__init__(rounds)
        self.expected: dict[str, Tensor] = {}
        propose, drawn = rounds.propose, torch.Generator().manual_seed(5)

        def watched(sampled: Sequence[list[int]], lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
            layers = [torch.randn(1 + len(one.draft), 32, generator=drawn) for one in self.running]
            model.compute_logits(model.model.norm(torch.cat(layers)))
            for one, layer, ids in zip(self.running, layers, sampled, strict=True):
                self.expected[one.name] = unit(layer[len(ids) - 1])
            return propose(sampled, lengths, tokens)

        rounds.propose = watched  # type: ignore[method-assign]


def test_each_request_is_told_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    rounds = loaded(monkeypatch, METHOD.format(folder), model).rounds
    told: list[Tensor | None] = []
    monkeypatch.setattr(TrigramLookup, "told", lambda self, memory, hidden: told.append(hidden))
    runner = Watched(rounds, model)
    for first in range(3):
        runner.add(Request(f"r{first}", [first, *TEXT], TEXT * 2))
    for step in range(8):
        if step == 2:
            runner.add(Request("late", [8, *TEXT], TEXT * 2))
        waiting = ["late"] if step in (2, 3) else []
        told.clear()
        runner.step(waiting)
        expected = [runner.expected[one.name] for one in runner.running if one.name not in waiting]
        assert len(told) == len(expected)
        for hidden, wanted in zip(told, expected, strict=True):
            assert hidden is not None
            torch.testing.assert_close(hidden, wanted, rtol=1e-3, atol=1e-3)
    assert runner.accepted > 10


def test_drafts_follow_the_guide(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a request drafts is what the same lookup proposes for that state, and not what n-grams alone do."""
    model = Model()
    rounds = loaded(monkeypatch, METHOD.format(folder), model).rounds
    drafts, others = [], 0
    runner = Watched(rounds, model)
    request = runner.add(Request("one", list(TEXT), TEXT * 3))
    lookup = rounds.source.lookup
    for _ in range(6):
        runner.step()
        memory, without = lookup.begin(request.ids), lookup.begin(request.ids)
        lookup.told(memory, runner.expected["one"])
        [found, alone] = lookup.propose_all([request.ids] * 2, [memory, without], 4, 4)
        assert request.draft == found.tokens
        drafts.append(request.draft)
        others += found.tokens != alone.tokens
    assert others
    assert all(drafts)


def test_a_step_whose_states_are_not_known_drafts_by_ngrams(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = loaded(monkeypatch, METHOD.format(folder), Model()).rounds
    seen: list[Memory] = []
    follow = TrigramLookup.propose_all
    monkeypatch.setattr(
        TrigramLookup, "propose_all", lambda self, ids, memories, *limits: (
            seen.extend(memories),
            follow(self, ids, memories, *limits),
        )[1]
    )  # fmt: skip
    runner = Runner(rounds)
    request = runner.add(Request("one", list(TEXT), TEXT))
    runner.step()
    assert request.draft
    assert [memory.hidden for memory in seen] == [None]


class TestWhatIsRefused:
    def test_a_guide_for_other_states(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        with pytest.raises(CheckpointMismatch, match="have 32 numbers, not 64"):
            loaded(monkeypatch, METHOD.format(folder), Model(hidden_size=64))
        assert not caplog.records

    def test_auto_goes_on_without(
        self, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        guide = drawn_guide(small_llama(0).float())
        guide.config = guide.Config(**{**vars(guide.config), "target": "none"})
        guide.save(guide.stored_path(SimpleNamespace(name="none")))  # type: ignore[arg-type]
        with caplog.at_level(logging.WARNING, "paceline"):
            assert loaded(monkeypatch, "auto", Model()).rounds.states is not None
            assert not caplog.records
            assert loaded(monkeypatch, "auto", Model(hidden_size=64)).rounds.states is None
        assert "trigram goes without its guide: it was made for none" in caplog.text

    def test_without_any_nothing_is_said(
        self, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, "paceline"):
            assert loaded(monkeypatch, "auto", Model()).rounds.states is None
        assert not caplog.records

    def test_no_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(PacelineError, match="there is no guide in /nowhere"):
            loaded(monkeypatch, METHOD.format("/nowhere"), Model())

    def test_ranks_that_must_draft_alike_have_none(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        made = loaded(monkeypatch, METHOD.format(folder), Model(), executor="external_launcher")
        assert made.rounds.states is None

    def test_a_package_is_named_that_is_not_there(self) -> None:
        program = (
            "import sys; sys.modules['gguf'] = None\n"
            "from paceline.errors import OptionError\n"
            "from paceline.integrations.vllm import states\n"
            "try: states._guide('x', True, '', 0, None)\n"
            "except OptionError as error: sys.exit(0 if 'pip install gguf' in str(error) else 1)\n"
            "sys.exit(2)\n"
        )
        subprocess.run([sys.executable, "-c", program], check=True)
