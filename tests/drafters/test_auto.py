"""`auto`: which sources it has, that it asks them where they pay, and that its output is plain decoding's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from helpers import hf_greedy, one_thread  # noqa: F401
from paceline.api import LLM
from paceline.drafters.auto import Auto, datastore
from paceline.drafters.dflash.head import DFlashHead
from paceline.drafters.eagle.drafter import Eagle
from paceline.drafters.eagle.head import EagleHead
from paceline.drafters.medusa.head import MedusaHead
from paceline.drafters.merge import Merge
from paceline.drafters.suffix import Suffix
from paceline.drafters.trigram.guide import Guide
from paceline.drafting.base import Drafter, Row
from paceline.drafting.pause import Pause
from paceline.drafting.pool import Pool
from paceline.drafting.stepping.forward import ALONG, TAIL
from paceline.drafting.tree import TokenTree
from paceline.drafting.tree_drafter import TreeDrafter
from paceline.errors import IntegrityError, PacelineError
from paceline.policies import POLICIES
from paceline.policies.adaedl import AdaEDL
from paceline.targets import Target, as_target
from paceline.targets.cost_model import Costs
from paceline.targets.costs import set_costs
from paceline.targets.native import available
from tiny import byte_tokenizer, small_llama

TEXT = [5, 6, 7, 8, 9, 5, 6, 7, 8]


def test_without_a_trained_head() -> None:
    drafter = Auto(as_target(small_llama()))
    assert [part.source for part in drafter.parts] == ["trigram", "suffix"]
    assert drafter.reads_costs


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("eagle", lambda model: EagleHead.from_target(model)),
        ("dflash", lambda model: DFlashHead.from_target(model)),
        ("medusa", lambda model: MedusaHead.from_target(model, heads=3)),
    ],
)
def test_with_a_trained_head(kind: str, make: Callable[[Any], Any], tmp_path: Path) -> None:
    target = as_target(small_llama())
    make(small_llama()).save(tmp_path / "head")
    drafter = Auto(target, head=str(tmp_path / "head"))
    assert [part.source for part in drafter.parts] == ["trigram", "suffix", kind]
    assert drafter.paid
    assert not drafter.whole
    assert Auto(target, head="none").paid == {}


@pytest.mark.skipif(not available(), reason="a guide needs a C++ compiler with OpenMP")
def test_a_guide_takes_the_place_of_a_head_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("paceline.drafters.auto.trained_head", lambda target, head: asked.append(head))
    target, model = as_target(small_llama()), small_llama()
    for guide, head in ((guide_of(model), "auto"), (guide_of(model), "mine"), ("none", "auto")):
        Auto(target, guide=guide, head=head)
    assert asked == ["mine", "auto"]


def guide_of(model: Any) -> Any:
    return Guide.from_target(model, rank=32, inner=32)


def test_a_head_that_is_not_there() -> None:
    with pytest.raises(PacelineError, match="nowhere"):
        Auto(as_target(small_llama()), head="nowhere")


class Clockwork(TreeDrafter):
    """Proposes one token, which is right or not, and takes so many seconds for it."""

    def __init__(
        self, target: Target, name: str, token: Callable[[Row], int], clock: list[float], takes: float
    ) -> None:
        super().__init__(target, 4)
        self.source, self.token, self.clock, self.takes, self.asked = name, token, clock, takes, 0

    def propose(self, row: Row, memory: object, depth: int, min_score: float) -> TokenTree:
        self.asked += 1
        self.clock[0] += self.takes
        tree = TokenTree.root(row.ids[-1])
        tree.add(self.token(row), 0, self.source, score=0.9)
        return tree


@pytest.mark.parametrize(("takes", "most"), [(0.01, 1.0), (3.0, 0.2)])
def test_a_source_is_asked_as_long_as_it_pays(takes: float, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes take a second. The first source is always wrong; the second right, but dear."""
    target, clock = as_target(small_llama()), [0.0]
    set_costs(target, Costs({1: 1.0, 8: 1.1}))
    monkeypatch.setattr("paceline.drafters.merge.now", lambda: clock[0])
    answer = hf_greedy(target.model, TEXT, 120)
    known = [*TEXT, *answer, 0]
    wrong = Clockwork(target, "wrong", lambda row: known[len(row.ids)] ^ 1, clock, 0.2)
    right = Clockwork(target, "right", lambda row: known[len(row.ids)], clock, takes)
    llm = LLM(target, Merge(target, drafters=[wrong, right]), POLICIES.parse("fixed:k=4"))
    output = llm.generate(TEXT, max_new_tokens=120, eos=())
    assert output.tokens == answer
    rounds = len(output.stats.rounds)
    assert wrong.asked < 0.5 * rounds
    assert right.asked <= most * rounds
    assert right.asked > (0.9 * rounds if most == 1 else 0)


class Wide(TreeDrafter):
    """Proposes so many tokens side by side, from one on."""

    def __init__(self, target: Target, first: int, count: int = 20) -> None:
        super().__init__(target, count)
        self.tokens = range(first, first + count)

    def propose(self, row: Row, memory: object, depth: int, min_score: float) -> TokenTree:
        tree = TokenTree.root(row.ids[-1])
        for token in self.tokens:
            tree.add(token, 0, "wide", score=0.9)
        return tree


@pytest.mark.parametrize("batch", [1, 2])
def test_no_more_is_verified_than_the_cache_has_room_for(batch: int) -> None:
    """Where width costs nothing all candidates of all sources pay, and together they are more than a pass may have."""
    target = as_target(small_llama())
    set_costs(target, Costs({1: 1.0, 256: 1.0001}))
    merge = Merge(target, drafters=[Wide(target, 1), Wide(target, 50), Wide(target, 100)])
    outputs = LLM(target, merge, POLICIES.parse("fixed:k=4")).generate(
        [TEXT] * batch, max_new_tokens=6, batch=batch, eos=()
    )
    most = max(drafted.drafted for output in outputs for drafted in output.stats.rounds)
    assert 20 < most <= merge.max_nodes(4) < 60


@pytest.mark.parametrize("batch", [1, 3])
def test_output_is_plain_decodings(batch: int, tmp_path: Path) -> None:
    model = small_llama()
    EagleHead.from_target(model).save(tmp_path / "head")
    llm = paceline.load(model, drafter=f"auto:head={tmp_path / 'head'}")
    prompts = [TEXT, TEXT[::-1] * 2, [3]]
    outputs = llm.generate(prompts, max_new_tokens=24, batch=batch, eos=())
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.tokens == hf_greedy(model, prompt, 24)


def test_a_head_that_is_not_asked_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then, when it is asked for the first time, what it needs of all that has come."""
    model, rounds = small_llama(), 0
    EagleHead.from_target(model).save(tmp_path / "head")
    llm = paceline.load(model, drafter=f"auto:head={tmp_path / 'head'}")
    drafter = llm.drafter
    assert isinstance(drafter, Auto)
    [(at, eagle)] = drafter.paid.items()
    assert isinstance(eagle, Eagle)

    def asks(pool: Pool, number: int, seconds: float, random: object) -> bool:
        nonlocal rounds
        rounds += number == at
        return number == at and rounds > 20

    monkeypatch.setattr(Pool, "asks", asks)
    [request] = llm.requests([TEXT], max_new_tokens=80, eos=())
    for _ in llm.engine.run([request]):
        if rounds <= 20:
            assert not eagle.forward.cache.lengths.any()
            waiting, come = len(request.state.views[at].state.waiting), len(request.ids) - 1
            assert waiting == come if come <= eagle.forward.most else eagle.forward.most <= waiting <= come
        elif rounds == 21:
            assert eagle.forward.cache.lengths[0] == TAIL + ALONG
    assert rounds > 25
    assert request.output == hf_greedy(model, TEXT, 80)


def test_a_head_that_was_not_asked_has_to_be_worth_its_catching_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third round it is not asked; catching up then takes five seconds, and nothing else takes any."""
    EagleHead.from_target(model := small_llama()).save(tmp_path / "head")
    llm = paceline.load(model, drafter=f"auto:head={tmp_path / 'head'}")
    drafter, clock, told = llm.drafter, [0.0], list[float]()
    assert isinstance(drafter, Auto)
    [(at, eagle)] = drafter.paid.items()
    assert isinstance(eagle, Eagle)
    catch_up = eagle.catch_up

    def slow(rows: Sequence[Row]) -> None:
        clock[0] += 5.0
        catch_up(rows)

    def asks(pool: Pool, number: int, seconds: float, random: object) -> bool:
        if number == at:
            told.append(seconds)
        return number == at and len(told) % 3 > 0

    monkeypatch.setattr("paceline.drafters.merge.now", lambda: clock[0])
    monkeypatch.setattr(eagle, "catch_up", slow)
    monkeypatch.setattr(Pause, "pauses", lambda *_: False)
    monkeypatch.setattr(Pool, "asks", asks)
    llm.generate(TEXT, max_new_tokens=120, eos=())
    after_a_pause, at_once = told[6::3], [*told[4::3], *told[5::3]]
    assert len(after_a_pause) > 2
    assert after_a_pause == pytest.approx([5.0] * len(after_a_pause), rel=0.1)
    assert not any(at_once)


def test_seeds_give_their_own_samples(tmp_path: Path) -> None:
    model = small_llama()
    EagleHead.from_target(model).save(tmp_path / "head")
    plain, auto = (paceline.load(model, drafter=name) for name in ("none", f"auto:head={tmp_path / 'head'}"))
    options: dict[str, Any] = {"max_new_tokens": 24, "temperature": 1.0, "seed": 3, "eos": ()}
    assert auto.generate(TEXT, **options).tokens == plain.generate(TEXT, **options).tokens
    assert torch.is_tensor(model.lm_head.weight)


def test_samples_teach_greedy_requests_nothing() -> None:
    """What is right greedily is right less often where tokens are drawn; the latter begin with the former."""
    llm = paceline.load(small_llama(), tokenizer=byte_tokenizer(), drafter="auto:head=none", fresh=True)
    auto = llm.drafter
    assert isinstance(auto, Auto)
    llm.generate(TEXT, max_new_tokens=40, eos=())
    greedy, gates = auto.calibration.kept(), [gate.kept() for gate in auto.known.values()]
    assert greedy
    assert auto.calibration_of_samples.kept() == []
    llm.generate(TEXT, max_new_tokens=40, eos=(), temperature=0.5, seed=1)
    assert auto.calibration_of_samples.kept() != []
    assert auto.calibration.kept() == greedy
    assert [gate.kept() for gate in auto.known.values()] == gates


def test_a_datastore_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = as_target(small_llama())
    assert datastore(target) == []
    monkeypatch.setattr("paceline.drafters.auto.datastore_folder", lambda name: tmp_path)
    monkeypatch.setattr("paceline.drafters.rest.drafter.Rest", lambda target: Suffix(target))
    assert [type(part) for part in datastore(target)] == [Suffix]

    def damaged(target: Target) -> Drafter:
        raise IntegrityError("the datastore is damaged")

    monkeypatch.setattr("paceline.drafters.rest.drafter.Rest", damaged)
    assert datastore(target) == []
    assert "the datastore is damaged" in caplog.text


def test_rounds_of_a_prediction_say_nothing_to_its_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which was not asked how far to draft."""
    told = list[tuple[int, int]]()
    monkeypatch.setattr(AdaEDL, "observe", lambda self, drafted, accepted: told.append((drafted, accepted)))
    llm = paceline.load(small_llama(), tokenizer=byte_tokenizer(), drafter="suffix", policy="adaedl")
    text = llm.generate(TEXT, max_new_tokens=40, eos=()).tokens
    plain = len(told)
    told.clear()
    output = llm.generate(TEXT, max_new_tokens=40, eos=(), prediction=text)
    assert output.tokens == text
    assert len(told) < len(output.stats.rounds) < plain


def test_rounds_of_a_prediction_say_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the output is as predicted nobody else is asked: nothing is learned of what drafts are worth."""
    llm = paceline.load(small_llama(), tokenizer=byte_tokenizer(), drafter="auto:head=none", fresh=True)
    learned: list[float] = []
    monkeypatch.setattr(Pause, "learn", lambda self, rows, gain, *rest: learned.append(gain))
    text = llm.generate(TEXT, max_new_tokens=40, eos=()).tokens
    assert learned
    learned.clear()
    output = llm.generate(TEXT, max_new_tokens=40, eos=(), prediction=text)
    assert output.tokens == text
    assert len(output.stats.rounds) < 20
    assert all(gain > 0 for gain in learned)  # of rounds in which it was asked, as where the prediction's end was near
