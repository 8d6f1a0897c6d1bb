"""paceline in vLLM, held against a stand-in for its model runner: drafts, lengths, rows and faults."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafting.budget import Calibration
from paceline.drafting.lookup import Candidates, chain
from paceline.errors import OptionError, PacelineError
from paceline.integrations.vllm import Proposer, WorkerExtension, proposer
from paceline.integrations.vllm.lengths import Lengths, learn, path_probabilities
from paceline.integrations.vllm.rounds import Rounds
from paceline.integrations.vllm.rows import KEPT, ContentRows, NamedRows
from paceline.integrations.vllm.settings import WORTH, VLLMSettings, check_version, source_of

OWNER = SimpleNamespace(
    name="none",
    tier="vllm",
    tokenizer=None,
    vocab_size=64,
    device=torch.device("cpu"),
    foreign=True,
    chains_only=True,
    has_blocks=False,
)
FIXED = "suffix:budget=8+fixed:k=8"


@dataclass
class Request:
    name: str
    ids: list[int]
    text: list[int]  # how it goes on
    prompt: int = 0
    draft: list[int] = field(default_factory=list)
    extra: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.prompt = len(self.ids)


class Runner:
    """vLLM's model runner, as far as proposers see it, with a "model" that knows how each text goes on."""

    def __init__(self, rounds: Rounds, max_model_len: int = 128) -> None:
        self.rounds, self.max_model_len = rounds, max_model_len
        self.running: list[Request] = []
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_ids=[])
        self.drafted = self.accepted = 0

    def add(self, request: Request) -> Request:
        self.running.append(request)
        self.requests[request.name] = SimpleNamespace(sampling_params=SimpleNamespace(extra_args=request.extra))
        return request

    def step(self, waiting: Sequence[str] = ()) -> None:
        """Verify each draft and ask for the next; the prompts of those that wait are still being read."""
        sampled = []
        for request in self.running:
            if request.name in waiting:
                sampled.append([])
                continue
            at = len(request.ids) - request.prompt
            right = 0
            while right < len(request.draft) and request.text[at + right : at + right + 1] == [request.draft[right]]:
                right += 1
            new = request.text[at : at + right + 1]
            self.drafted += len(request.draft)
            self.accepted += len(new) - 1
            request.ids += new
            sampled.append(new)
        for request in [r for r in self.running if len(r.ids) - r.prompt >= len(r.text)]:
            at = self.running.index(request)
            self.running[at], sampled[at] = self.running[-1], sampled[-1]  # vLLM moves the last row into the gap
            self.running.pop()
            sampled.pop()
            del self.requests[request.name]
        tokens = np.zeros((len(self.running) + 2, self.max_model_len), np.int32)
        lengths = np.zeros(len(self.running) + 2, np.int32)
        for row, request in enumerate(self.running):
            tokens[row, : len(request.ids)] = request.ids
            lengths[row] = len(request.ids)
        self.input_batch.req_ids = [request.name for request in self.running]
        drafts = self.rounds.propose(sampled, lengths, tokens)
        assert len(drafts) == len(self.running)
        for request, draft in zip(self.running, drafts, strict=True):
            assert len(draft) <= min(self.rounds.settings.most, max(self.max_model_len - len(request.ids) - 1, 0))
            assert request.name not in waiting or draft == []
            request.draft = draft


def rounds_of(method: str = FIXED, mode: str = "ragged", most: int = 4, clock: Any = None, length: int = 128) -> Rounds:
    wanted = VLLMSettings(method, mode, most, length)
    return Rounds(source_of(method, OWNER), wanted, *([clock] if clock else []))


def config(additional: Any = None, executor: str | None = None, most: int = 4) -> Any:
    model = SimpleNamespace(
        model="none", tokenizer="/nowhere/none", tokenizer_revision=None, max_model_len=128, get_vocab_size=lambda: 64
    )
    return SimpleNamespace(
        additional_config=additional,
        model_config=model,
        parallel_config=SimpleNamespace(distributed_executor_backend=executor),
        speculative_config=SimpleNamespace(num_speculative_tokens=most),
    )


PHRASE = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.mark.parametrize("method", ["suffix", "prompt-lookup", "trigram:matrix=none", "merge:drafters=suffix|trigram"])
@pytest.mark.parametrize("named", [False, True])
def test_repeated_text_is_drafted(method: str, named: bool) -> None:
    """Of texts that repeat themselves most is accepted, with rows that come, move and go."""
    colon = "" if ":" not in method else "trigram;matrix=none"
    method = method if "merge" not in method else f"merge:drafters=suffix|{colon}"
    runner = Runner(rounds_of(f"{method}:budget=8+fixed:k=4"))
    if named:
        runner.rounds.rows = NamedRows(runner)
    for at, count in enumerate((2, 5, 3)):
        runner.add(Request(f"r{at}", [at + 10, *PHRASE, *PHRASE], PHRASE * count))
        runner.step(waiting=[f"r{at}"] if at == 2 else [])
    for _ in range(30):
        runner.step()
    assert not runner.running
    assert runner.accepted > 0.7 * runner.drafted > 0
    rows = runner.rounds.rows
    assert isinstance(rows, ContentRows) or not rows._rows


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_rows_by_content_and_by_name(texts: list[list[int]]) -> None:
    """Both ways to tell requests draft the same, for equal texts and texts of any length."""
    drafts = []
    for named in (False, True):
        runner = Runner(rounds_of("suffix:shortest=1:budget=8+schedule:k=2"))
        if named:
            runner.rounds.rows = NamedRows(runner)
        requests = [runner.add(Request(f"r{at}", [1, 2], text)) for at, text in enumerate(texts)]
        seen = []
        while runner.running:
            runner.step()
            seen.append([request.draft for request in requests if request in runner.running])
        drafts.append(seen)
    assert drafts[0] == drafts[1]


def test_equal_requests_have_states_of_their_own() -> None:
    rounds = rounds_of()
    runner = Runner(rounds)
    one, two = (runner.add(Request(name, PHRASE * 2, PHRASE * 2)) for name in "ab")
    runner.step()
    assert one.draft == two.draft == PHRASE[1:5]
    assert len({id(row) for rows in rounds.rows._rows.values() for row in rows}) == 2  # type: ignore[union-attr]


def test_requests_that_left_are_forgotten() -> None:
    rounds = rounds_of()
    runner = Runner(rounds)
    runner.add(Request("gone", [7, 8, 9], [1, 2]))
    runner.add(Request("stays", [5, 6], list(range(40)) * 2))
    for _ in range(KEPT + 3):
        runner.step()
    assert sum(map(len, rounds.rows._rows.values())) == 1  # type: ignore[union-attr]


def test_context_ends() -> None:
    """Drafts never reach beyond the context."""
    runner = Runner(rounds_of(length=24), 24)
    request = runner.add(Request("r", PHRASE * 2, PHRASE))
    while runner.running:
        runner.step()  # which looks at every draft
        if runner.running:
            assert len(request.draft) == min(4, 24 - len(request.ids) - 1)


# -- lengths -----------------------------------------------------------------------------------------------------------
def seconds(rows: int, tokens: int, slope: float) -> float:
    return 0.01 * (1 + slope * (rows + tokens))


class Clock:
    """Time passes while a step runs: as long as its tokens take."""

    def __init__(self, slope: float) -> None:
        self.now, self.slope, self.runner = 0.0, slope, None

    def __call__(self) -> float:
        return self.now

    def step(self, runner: Runner) -> None:
        self.now += seconds(len(runner.running), sum(len(r.draft) for r in runner.running), self.slope)
        runner.step()


def drafted_share(slope: float, right: float, requests: int, mode: str = "ragged") -> float:
    """Share of the most that could be drafted that is, late in a run with such costs."""
    clock = Clock(slope)
    runner = Runner(rounds_of("prompt-lookup", mode, clock=clock, length=4096), 4096)
    random = np.random.default_rng(0)
    for at in range(requests):
        text = [token if random.random() < right else int(random.integers(16, 64)) for token in PHRASE * 60]
        runner.add(Request(f"r{at}", PHRASE * 2, text))
    drafted, could = 0, 0
    for turn in range(70):
        clock.step(runner)
        drafted += sum(len(r.draft) for r in runner.running) * (turn >= 40)
        could += 4 * len(runner.running) * (turn >= 40)
    return drafted / could


@pytest.mark.parametrize("mode", ["ragged", "pad", "all-or-nothing"])
def test_drafts_where_they_pay(mode: str) -> None:
    assert drafted_share(0.001, 1.0, 4, mode) > 0.9  # passes hardly cost more when wider
    assert drafted_share(10.0, 0.3, 4, mode) < 0.15  # they cost nearly as much as tokens decoded one by one


def test_load_ends_drafting() -> None:
    """Where a step's time grows with its tokens, drafting ends by itself as requests get more."""

    def slope(requests: int) -> float:  # free up to 8 tokens, then in proportion: as a processor that is full
        return 0.0 if requests < 2 else 1.0

    assert drafted_share(slope(1), 0.6, 1) > 0.5 > 0.35 > drafted_share(slope(16), 0.6, 16)


@pytest.mark.parametrize(("rows", "least"), [(16, 0.96), (4, 1.1), (1, 1.4)])
def test_little_is_lost_while_costs_are_learned(rows: int, least: float) -> None:
    """Speed against steps without drafts, from the first step on."""
    assert drafted_by_cost(rows, 2000)[0] > least


@pytest.mark.parametrize(("rows", "least"), [(16, 0.97), (4, 0.94)])
def test_drafts_go_on_for_a_little_of_the_speed(rows: int, least: float) -> None:
    speed, accepted = drafted_by_cost(rows, 6000)
    best, fewer = drafted_by_cost(rows, 6000, Lengths(8, "ragged", 1.0))
    assert accepted > 1.1 * fewer
    assert speed > least * best


def test_each_load_has_its_own_rate() -> None:
    """What drafts brought to one request alone is no measure for sixteen."""
    lengths = Lengths(8, "ragged", 1.0)
    drafted_by_cost(1, 2000, lengths)
    _, soon = drafted_by_cost(16, 1000, lengths)
    _, usual = drafted_by_cost(16, 6000, lengths)
    assert soon > 0.8 * usual


def drafted_by_cost(rows: int, passes: int, lengths: Lengths | None = None) -> tuple[float, float]:
    """With tokens as dear as on two cores, `passes` of all rows together: speed against steps without drafts, and which
    share of the tokens was drafted.
    """
    random, lengths = np.random.default_rng(0), lengths or Lengths(8, "ragged", WORTH)

    def cost(tokens: int) -> float:
        return 0.035 + 0.0079 * (tokens - 1)

    taken, tokens, steps = 0.0, 0, passes // rows
    for _ in range(steps):
        right = np.where(random.random(rows) < 0.35, 0.9, 0.3)  # P(the next token is right), of each request
        chosen = lengths.choose(right[:, None] ** np.arange(1, 9))
        came = [1 + int((random.random(n) < p).cumprod().sum()) for n, p in zip(chosen.tolist(), right, strict=True)]
        step = cost(rows + int(chosen.sum())) * random.lognormal(0, 0.03)
        lengths.observe(rows, int(chosen.sum()), sum(came), step)
        taken, tokens = taken + step, tokens + sum(came)
    return tokens / taken * cost(rows) / rows, 1 - steps * rows / tokens


def test_first_step_is_plain_and_unknown_costs() -> None:
    lengths = Lengths(4, "ragged", WORTH)
    sure = np.full((2, 4), 0.99)
    assert lengths.choose(sure).tolist() == [0, 0]
    assert lengths.choose(sure, chosen=False).tolist() == [4, 4]
    lengths.observe(2, 8, 10, 1.0)  # a step with drafts does not show what one without takes
    assert lengths.choose(sure).tolist() == [0, 0]
    assert lengths.relative(2, 1) > 1
    lengths.observe(2, 0, 2, 1.0)
    assert lengths.relative(2, 1) > 1
    assert lengths.choose(sure).sum() == 2  # no step is more than twice as wide as the widest before it
    lengths.observe(2, 2, 4, 1.01)
    lengths.observe(2, 6, 8, 1.03)
    assert lengths.choose(sure).tolist() == [4, 4]
    assert lengths.choose(np.array([[0.9, 0.8, 0.7, 0.6], [1e-9, 0, 0, 0]])).tolist() == [4, 0]
    assert lengths.choose(np.zeros((2, 4))).tolist() == [0, 0]


def test_all_or_nothing_needs_all() -> None:
    lengths = Lengths(2, "all-or-nothing", WORTH)
    lengths.observe(2, 0, 2, 1.0)
    assert lengths.choose(np.array([[0.9, 0.9], [0.9, 0.0]])).tolist() == [0, 0]
    assert lengths.choose(np.array([[0.9, 0.9], [0.9, 0.9]])).tolist() == [2, 2]


def test_pad_fills_up() -> None:
    runner = Runner(rounds_of("suffix:budget=8+fixed:k=4", "pad"))
    one = runner.add(Request("a", PHRASE * 2, PHRASE * 2))
    two = runner.add(Request("b", [20, 21, 22], [23, 24, 25]))
    runner.step()
    assert (one.draft, two.draft) == (PHRASE[1:5], [23] * 4)


def test_calibration_learns() -> None:
    found, calibration = chain([1, 2, 3], [0.9, 0.8, 0.7], "x"), Calibration()
    before = path_probabilities(found, [1, 2, 3], calibration)
    for _ in range(50):
        learn(found, [1, 2, 3], [9], calibration)
    wrong = path_probabilities(found, [1, 2, 3], calibration)
    for _ in range(500):
        learn(found, [1, 2, 3], [1, 2, 3], calibration)
    right = path_probabilities(found, [1, 2, 3], calibration)
    assert wrong[2] < before[2] < right[2]
    assert right == sorted(right, reverse=True)


# -- faults ------------------------------------------------------------------------------------------------------------
def test_a_failing_row_goes_plain(caplog: pytest.LogCaptureFixture) -> None:
    """A source that throws for one text harms no other, and says so once."""
    rounds = rounds_of()
    lookup = rounds.source.lookup

    class Broken(type(lookup)):  # type: ignore[misc]
        def begin(self, ids: Sequence[int]) -> Any:
            if ids[0] == 50:
                raise ValueError("no beginning")
            return super().begin(ids)

        def observe(self, ids: list[int], memory: Any) -> None:
            if ids[0] == 51:
                raise ValueError("no observing")

        def propose(self, ids: list[int], *args: Any, **kwargs: Any) -> Candidates:
            if ids[0] == 52:
                raise ValueError("no proposing")
            return super().propose(ids, *args, **kwargs)

    rounds.source = rounds.source._replace(lookup=Broken(2))
    runner = Runner(rounds)
    bad = [runner.add(Request(f"bad{first}", [first, *PHRASE * 2], PHRASE)) for first in (50, 51, 52)]
    good = runner.add(Request("good", [49, *PHRASE * 2], PHRASE))
    with caplog.at_level(logging.WARNING, "paceline"):
        for _ in range(2):
            runner.step()
            assert [request.draft for request in bad] == [[], [], []]
    assert good.ids[17:] == PHRASE[:6]
    assert len(caplog.records) == 3


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Proposer:
    monkeypatch.setattr(proposer, "version", lambda name: "0.32.0")
    monkeypatch.setattr(proposer, "mend_sampling", lambda: False)
    return Proposer(config({"paceline": {"method": "trigram+fixed:k=2"}}))


def test_proposer_never_raises(loaded: Proposer, caplog: pytest.LogCaptureFixture) -> None:
    loaded.load_model(None)
    with caplog.at_level(logging.WARNING, "paceline"):
        for _ in range(2):
            assert loaded.propose([[1], []], None, None) == [[], []]  # type: ignore[arg-type]
    assert len(caplog.records) == 1
    tokens = np.zeros((2, 128), np.int32)
    tokens[0, :9] = [1, 2, 3, 1, 2, 3, 1, 2, 3]
    lengths = np.array([9, 0])
    assert loaded.propose([[3]], lengths, tokens) == [[]]  # the first step is plain


def test_worker_extension(loaded: Proposer, caplog: pytest.LogCaptureFixture) -> None:
    """Requests say how far they draft, and one that asks for nonsense is served all the same."""
    loaded.rounds = rounds_of()
    runner = Runner(loaded.rounds)
    worker = WorkerExtension()
    worker.model_runner = SimpleNamespace(drafter=None)
    worker.init_worker_extension()
    runner.drafter = loaded  # type: ignore[attr-defined]
    worker.model_runner = runner
    worker.init_worker_extension()
    asked = {"off": "fixed:k=0", "two": "fixed:k=2", "odd": "fixed:k=none"}
    requests = {
        name: runner.add(Request(name, PHRASE * 2, PHRASE, extra={"paceline_policy": policy}))
        for name, policy in asked.items()
    }
    requests["plain"] = runner.add(Request("plain", PHRASE * 2, PHRASE))
    with caplog.at_level(logging.WARNING, "paceline"):
        runner.step()
    assert {name: len(request.draft) for name, request in requests.items()} == {
        "off": 0,
        "two": 2,
        "odd": 4,
        "plain": 4,
    }
    assert "paceline_policy is left out" in caplog.text


def test_named_rows_catch_up() -> None:
    """When vLLM has left out a step, as it does near the end of another's context."""
    rounds = rounds_of()
    runner = Runner(rounds)
    rounds.rows = NamedRows(runner)
    request = runner.add(Request("r", PHRASE * 2, PHRASE * 3))
    runner.step()
    request.ids += request.text[1:3]
    request.draft = []
    runner.step()
    assert request.draft == PHRASE[4:8]


def test_a_policy_that_throws_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """One that a request asks for, out of range or naming a file."""
    for policy in ("cali-ts:sigma_m=1e200", "cali-ts:predictor=\0", "specdec++:predictor=/etc/passwd"):
        rounds = rounds_of()
        runner = Runner(rounds)
        rounds.rows = NamedRows(runner)
        runner.add(Request("bad", PHRASE * 2, PHRASE, extra={"paceline_policy": policy}))
        good = runner.add(Request("good", PHRASE * 2, PHRASE))
        runner.step()
        assert len(good.draft) == 4
    assert "predictor cannot be set from a request" in caplog.text


def test_drafts_of_a_request_have_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    """Some policies work out a value for each length up to theirs, which would hold up all requests. Before that they
    are turned down, and the request is drafted for as others are.
    """
    rounds = rounds_of()
    runner = Runner(rounds)
    rounds.rows = NamedRows(runner)
    bad = runner.add(Request("bad", PHRASE * 2, PHRASE, extra={"paceline_policy": "pace:k-max=300000"}))
    good = runner.add(Request("good", PHRASE * 2, PHRASE, extra={"paceline_policy": "pace:k-max=32"}))
    runner.step()
    found = {row.policy.limit for row in rounds.rows._rows.values()}
    assert found == {8, 32}  # the engine's own, and what the second asks for
    assert (len(bad.draft), len(good.draft)) == (4, 4)
    assert "drafts up to 300000 tokens a step; here 32 at most" in caplog.text


@pytest.mark.parametrize("own", [{"most": 40}, {"method": "suffix:budget=8+fixed:k=40"}])
def test_the_engines_own_limit_is_everybodys(own: dict[str, Any]) -> None:
    rounds = rounds_of(**own)
    assert rounds._policy("fixed:k=40", remote=True).limit == 40
    with pytest.raises(OptionError, match="here 40 at most"):
        rounds._policy("fixed:k=41", remote=True)


def test_clients_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Nor hide what else goes wrong."""
    rounds = rounds_of()
    runner = Runner(rounds)
    rounds.rows = NamedRows(runner)
    for number in range(50):
        name = f"bogus-{number}-" + "x" * 1000
        runner.add(Request(name, PHRASE * 2, PHRASE, extra={"paceline_policy": name}))
    runner.step()
    assert 0 < len(caplog.records) < 10
    assert max(len(record.getMessage()) for record in caplog.records) < 500
    assert sum(map(len, rounds._logged.values())) == len(caplog.records)
    rounds.log_once("a step goes on without drafts", OptionError("another fault"))
    assert caplog.records[-1].getMessage().endswith("another fault")


def test_a_gap_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in which nobody was asked for drafts, as near the end of somebody's context."""
    rounds = rounds_of()
    runner = Runner(rounds)
    rounds.rows, seen = NamedRows(runner), list[object]()
    request = runner.add(Request("r", PHRASE * 2, PHRASE * 3))
    runner.step()
    monkeypatch.setattr(rounds.lengths, "observe", lambda *given: seen.append(given))
    request.ids += request.text[1:3]
    request.draft = []
    runner.step()
    assert not seen
    runner.step()
    assert seen


def test_requests_begin_with_what_others_have_taught() -> None:
    rounds = rounds_of("suffix+pace")
    first, second = (rounds._policy("pace") for _ in range(2))
    assert first._before is second._before  # type: ignore[attr-defined]


# -- options -----------------------------------------------------------------------------------------------------------
def test_shared_memories_are_refused() -> None:
    with pytest.raises(OptionError, match="keeps the texts of requests that ended"):
        source_of("suffix:share=process", OWNER)


@pytest.mark.parametrize(
    ("additional", "message"),
    [
        ({"paceline": {"metod": "trigram"}}, "no option 'metod'"),
        ({"paceline": {"worth": 2}}, "worth must be a number from 0 to 1, not '2'"),
        ({"paceline": {"worth": "much"}}, "worth must be a number from 0 to 1, not 'much'"),
        ({"paceline": {"worth": True}}, "worth must be a number from 0 to 1, not 'True'"),
        ({"paceline": {"mode": "square"}}, "ragged, pad, all-or-nothing"),
        ({"paceline": "trigram"}, "object"),
        ({"paceline": {"method": 5}}, "method must be a drafter's name, not 5"),
        ({"paceline": {"method": None}}, "method must be a drafter's name, not None"),
        (["paceline"], "additional_config must be an object"),
        ("paceline", "additional_config must be an object"),
    ],
)
def test_options_refused(additional: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        VLLMSettings.of(config(additional))


def test_options() -> None:
    assert VLLMSettings.of(config()).method == "auto"
    assert not VLLMSettings.of(config(executor="external_launcher")).timed


@pytest.mark.parametrize("method", ["recycling", "merge:drafters=suffix|lookahead", "suffix+nothing", "nothing"])
def test_methods_refused(method: str) -> None:
    owner = SimpleNamespace(**vars(OWNER), config=SimpleNamespace(vocab_size=64))
    with pytest.raises(PacelineError):
        Rounds(source_of(method, owner), VLLMSettings(method, "ragged", 4, 128))


@pytest.mark.parametrize("method", ["auto:head=/x", "recycling", "merge:drafters=suffix|lookahead"])
def test_methods_that_look_for_more_than_there_is(method: str) -> None:
    with pytest.raises(OptionError, match="cannot draft inside vLLM: it needs more than token ids"):
        source_of(method, OWNER)


def test_auto_is_its_sources_without_heads() -> None:
    assert {part.source for part in source_of("auto", OWNER).lookup.parts} == {"trigram", "suffix"}  # type: ignore[attr-defined]


def test_drafters_do_without_what_vllm_lacks() -> None:
    """vLLM's environment has no gguf."""
    program = (
        "import sys; sys.modules['gguf'] = None\n"
        "from paceline.drafters import DRAFTERS\n"
        "for name in ('trigram', 'suffix', 'prompt-lookup', 'rest', 'merge', 'auto'): DRAFTERS.get(name)\n"
        "import paceline.integrations.vllm\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_costs_by_policy() -> None:
    """Policies that read costs are told those of vLLM's steps; not where ranks must agree."""
    method = "suffix:budget=8+beta-ts:cost=auto"
    assert rounds_of(method)._policy("beta-ts:cost=auto").more(0) in (True, False)
    with pytest.raises(PacelineError, match="external_launcher"):
        Rounds(source_of(method, OWNER), VLLMSettings(method, "ragged", 4, 128, timed=False))


def test_requests_that_sample_are_of_a_kind_of_their_own() -> None:
    """They teach greedy ones nothing, and begin with what those have taught."""
    rounds = rounds_of("suffix:shortest=1:budget=8+pace")
    runner = Runner(rounds)
    rounds.rows = NamedRows(runner)  # type: ignore[arg-type]

    def trust(sampling: bool) -> list[float]:
        return [rounds._calibrations[sampling].factor("suffix", kind) for kind in range(20)]

    def run(name: str, temperature: float, text: list[int]) -> None:
        runner.add(Request(name, PHRASE * 2, text))
        runner.requests[name].sampling_params = SimpleNamespace(extra_args=None, temperature=temperature)
        for _ in range(6):
            runner.step()

    before = trust(sampling=False)
    run("sampled", 0.7, [*PHRASE[:2], 60] * 9)
    assert trust(sampling=False) == before != trust(sampling=True)
    run("greedy", 0.0, PHRASE * 3)
    assert trust(sampling=False) != before
    assert rounds._policy("pace", sampling=True)._before is not rounds._policy("pace")._before  # type: ignore[attr-defined]


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    check_version("0.33.0")
    for known in ("0.31.9", "0.34.0", "0.3.2", "unknown"):
        with pytest.raises(OptionError, match=f"not in {known}"):
            check_version(known)
    with pytest.raises(OptionError, match="not in unknown"):
        Proposer(config())  # vLLM is not installed here
