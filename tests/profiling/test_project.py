"""Replays of traces: the rounds are those of the model itself, and time is what the costs say."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paceline
from helpers import one_thread, perturbed  # noqa: F401
from paceline.clock import MadeUpClock, made_up, now
from paceline.drafters.eagle.drafter import Eagle
from paceline.drafters.eagle.head import EagleHead
from paceline.drafters.early_exit.drafter import EarlyExit
from paceline.drafters.early_exit.head import ExitHead
from paceline.drafters.medusa.drafter import Medusa
from paceline.drafters.medusa.head import MedusaHead
from paceline.drafters.suffix import Suffix
from paceline.drafting.base import Drafter
from paceline.errors import DataError, OptionError
from paceline.profiling import project as project_module
from paceline.profiling.project import check_method, project, terms_of
from paceline.profiling.record import record, sources_of
from paceline.profiling.recorded import PaidSource, Recorded, RecordedTarget, distribution
from paceline.profiling.rounds import setting_of
from paceline.profiling.shipped import load_profile, shipped
from paceline.profiling.trace import Header, Measured, Trace, TracedText, read_trace
from paceline.targets import Target
from paceline.targets.cost_model import Costs
from tiny import byte_tokenizer, small_llama

PROMPTS = ([5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 7, 9, 8], [3])
NEW = 30
PROFILE = {"context": 20, "passes": {"1": {"median": 1.0}, "4": {"median": 1.3}, "32": {"median": 4.0}}}


def eagle(target: Target, **options: Any) -> Drafter:
    return Eagle(target, head=EagleHead.from_target(small_llama()), **options)


SOURCES = {
    "suffix": lambda target: Suffix(target),
    "prompt-lookup:budget=4": None,
    "eagle": eagle,
    "eagle:tree=2:budget=6": lambda target: eagle(target, tree=2, budget=6),
    "medusa:tree=dynamic:budget=5": lambda target: Medusa(
        target, head=MedusaHead.from_target(small_llama(), heads=3), tree="dynamic", budget=5
    ),
    "early-exit": lambda target: EarlyExit(
        target, head=perturbed(ExitHead.from_target(small_llama(), 1, exit_layers=2), 0.05)
    ),
}


def llm_with(name: str, policy: str) -> paceline.LLM:
    drafter: Any = SOURCES.get(name) or name
    return paceline.load(small_llama(), tokenizer=byte_tokenizer(), drafter=drafter, policy=policy, fresh=True)


@pytest.fixture(scope="module")
def trace() -> Trace:
    plain = llm_with("none", "fixed:k=0")
    texts = []
    for number, prompt in enumerate(PROMPTS):
        output = plain.generate(prompt, max_new_tokens=NEW, eos=())
        texts.append(TracedText("chat", str(number), number, prompt, output.tokens))
    drafters = {name: plain.method(SOURCES[name] or name).drafter for name in SOURCES}
    drafters["auto:head=none"] = plain.method("auto:head=none").drafter
    drafters["merge:drafters=suffix|suffix;shortest=5"] = plain.method(
        "merge:drafters=suffix|suffix;shortest=5"
    ).drafter
    drafters["merge:drafters=suffix|eagle"] = plain.method(
        lambda target: paceline.drafters.merge.Merge(target, drafters=[Suffix(target), eagle(target, tree=2)])
    ).drafter
    drafters["merge:drafters=layer-skip|suffix"] = plain.method("merge:drafters=layer-skip|suffix").drafter
    sources, parts = sources_of(drafters)
    about = record(sources, texts, {"early-exit": 0.5})
    for one in about.values():  # as made up as the passes
        one.levels, one.observe = [0.1] * len(one.levels), 0.0
    measured = {"ar": {"chat": Measured(90, 90, 135.0)}}
    header = Header("tiny", 257, 256, "reference", {}, PROFILE, 0.5, {"eagle+fixed:k=1": 0.25}, about, parts, measured)
    return Trace(header, texts)


@pytest.mark.parametrize("policy", ["fixed:k=1", "fixed:k=4", "adaedl:gamma=0.5", "max-confidence", "beta-ts:k_max=8"])
@pytest.mark.parametrize("name", ["eagle", "early-exit"])
def test_rounds_of_a_policy_are_the_models(trace: Trace, name: str, policy: str) -> None:
    found = project(trace, f"{name}+{policy}", terms_of("here", PROFILE, trace))["chat"]
    llm = llm_with(name, policy)
    live = [llm.generate(text.prompt, max_new_tokens=NEW, eos=(), seed=text.seed) for text in trace.texts]
    assert found.rounds == sum(len(output.stats.rounds) for output in live)
    assert found.tokens == NEW * len(live)


@pytest.mark.parametrize("name", [name for name in SOURCES if "budget" in name])
def test_rounds_of_a_budget_are_the_models(trace: Trace, name: str) -> None:
    found = project(trace, f"{name}+fixed:k=4", terms_of("here", PROFILE, trace))["chat"]
    llm = llm_with(name, "fixed:k=4")
    live = [llm.generate(text.prompt, max_new_tokens=NEW, eos=()) for text in trace.texts]
    assert found.rounds == sum(len(output.stats.rounds) for output in live) < NEW * len(live)


def test_time_is_what_the_costs_say(trace: Trace) -> None:
    here = terms_of("here", PROFILE, trace)
    plain = project(trace, "ar", here)["chat"]
    assert plain.seconds == pytest.approx(1.5 * NEW * len(PROMPTS))  # a pass, and what a round takes besides
    one = project(trace, "eagle+fixed:k=1", here)["chat"]
    drafted = one.rounds - sum((text.output[-1:] != []) for text in trace.texts)  # the last token's round has no room
    assert one.seconds == pytest.approx(one.rounds * 1.75 + drafted * (0.1 + 0.1), rel=0.03)
    dear = terms_of("dear", {**PROFILE, "drafts": {"eagle": {"median": 5.0}, "medusa": None}}, trace)
    assert project(trace, "eagle+fixed:k=1", dear)["chat"].seconds > one.seconds + 4 * drafted


def test_what_a_draft_takes_by_a_profile(trace: Trace) -> None:
    """It is of a token of some; a head that computes all at once takes the time of all for the first."""
    eagle = replace(trace.header.sources["eagle"], levels=[0.4, 0.1, 0.0, 0.0, 0.0])
    uneven = Trace(replace(trace.header, sources={**trace.header.sources, "eagle": eagle}), trace.texts)

    def seconds(drafts: dict[str, float]) -> float:
        profile = {**PROFILE, "drafts": {name: {"median": median} for name, median in drafts.items()}}
        return project(uneven, "eagle+fixed:k=1", terms_of("here", profile, uneven))["chat"].seconds

    assert seconds({}) == pytest.approx(seconds({"eagle": 0.1}))
    assert seconds({"eagle": 0.2}) - seconds({}) == pytest.approx(seconds({"eagle": 0.3}) - seconds({"eagle": 0.2}))
    assert seconds({"eagle": 0.2}) > seconds({}) + 0.3 * NEW  # that is 0.4 a round, of nearly as many
    recorded = {**uneven.header.sources, "eagle:k=2": eagle}
    texts = [replace(text, drafts={**text.drafts, "eagle:k=2": text.drafts["eagle"]}) for text in uneven.texts]
    named = Trace(replace(uneven.header, sources=recorded), texts)
    by_kind, as_written = (
        project(named, "eagle:k=2+fixed:k=1", terms_of("here", {**PROFILE, "drafts": drafts}, named))["chat"].seconds
        for drafts in ({"eagle": {"median": 0.2}}, {"eagle": {"median": 0.2}, "eagle:k=2": {"median": 0.1}})
    )
    assert by_kind - as_written == pytest.approx(seconds({"eagle": 0.2}) - seconds({"eagle": 0.1}))


def test_predictors_lie_where_they_lay(trace: Trace, tmp_path: Path) -> None:
    """Those that were trained for the model, and those that come with its head."""
    there = replace(trace.header.sources["eagle"], predictors=[str(tmp_path / "trained"), str(tmp_path / "head")])
    known = Trace(replace(trace.header, target="tiny-1234", sources={"eagle": there}, parts={}), trace.texts)
    target: Any = RecordedTarget(known, Costs({1: 1.0, 2: 1.0}), MadeUpClock())
    setting = setting_of(PaidSource(Recorded(known, "eagle", target), target, "auto"), hidden=False)
    assert setting.predictors == (tmp_path / "trained", tmp_path / "head")
    assert setting.target == "tiny-1234"
    with pytest.raises(OptionError, match="predictor"):
        check_method(known, "eagle+disco", terms_of("here", PROFILE, known))
    check_method(known, "eagle+fixed:k=1", terms_of("here", PROFILE, known))


def test_costs_decide(trace: Trace) -> None:
    """`auto` drafts where width is free, and does not where a second token costs a pass of its own."""
    free = {"context": 20, "passes": {"1": {"median": 1.0}, "32": {"median": 1.0}}}
    steep = {"context": 20, "passes": {"1": {"median": 1.0}, "32": {"median": 32.0}}}
    rounds = {
        name: project(trace, "auto:head=none", terms_of(name, profile, trace))["chat"].rounds
        for name, profile in {"free": free, "steep": steep}.items()
    }
    assert rounds["free"] < 0.8 * rounds["steep"]
    assert rounds["steep"] > 0.8 * NEW * len(PROMPTS)


def test_parts_of_a_kind(trace: Trace) -> None:
    """A merge may have a drafter twice, with other options."""
    name = "merge:drafters=suffix|suffix;shortest=5"
    often, seldom = parts = trace.header.parts[name]
    assert (often, seldom) == (f"{name}/suffix", f"{name}/suffix-2")
    drafts = {part: [len(draft.tokens) for text in trace.texts for draft in text.drafts[part]] for part in parts}
    assert sum(drafts[often]) > sum(drafts[seldom])
    assert project(trace, name, terms_of("here", PROFILE, trace))["chat"].tokens == NEW * len(PROMPTS)


@pytest.mark.parametrize(
    "method",
    [
        "auto:head=none",
        "merge:drafters=suffix|eagle",
        "merge:drafters=layer-skip|suffix+pace",
        "eagle",
        "medusa:tree=dynamic:budget=5",
    ],
)
def test_the_same_every_time(trace: Trace, method: str) -> None:
    here = terms_of("here", PROFILE, trace)
    assert project(trace, method, here) == project(trace, method, here)


@pytest.mark.parametrize("name", shipped())
def test_shipped_profiles(trace: Trace, name: str) -> None:
    there = terms_of(name, load_profile(name), trace)
    times = [there.costs(width) for width in range(1, 65)]
    assert times == sorted(times)
    assert times[15] < 8 * times[0]
    assert project(trace, "suffix", there)["chat"].tokens == NEW * len(PROMPTS)


@pytest.mark.parametrize(
    ("method", "part"),
    [
        ("trigram", "not traced"),
        ("eagle+nope", "nope"),
        ("eagle+disco", "hidden|predictor"),
    ],
)
def test_what_was_not_traced(trace: Trace, method: str, part: str) -> None:
    with pytest.raises(OptionError, match=part):
        project(trace, method, terms_of("here", PROFILE, trace))


def test_a_source_that_shows_no_distributions(trace: Trace) -> None:
    """One that does not ask its policy step by step: what it drafts counts as chosen."""
    texts = [
        TracedText(**{**vars(text), "drafts": {"eagle": [replace(one, beliefs=[]) for one in text.drafts["eagle"]]}})
        for text in trace.texts
    ]
    silent = Trace(replace(trace.header, sources={"eagle": trace.header.sources["eagle"]}, parts={}), texts)
    here = terms_of("here", PROFILE, silent)
    sure = project(silent, "eagle+max-confidence:k-max=4", here)
    assert sure["chat"].rounds == project(silent, "eagle+fixed:k=4", here)["chat"].rounds


def test_what_cannot_be_traced() -> None:
    plain = llm_with("none", "fixed:k=0")
    with pytest.raises(OptionError, match="cannot be traced"):
        sources_of({"lookahead": plain.method("lookahead").drafter})
    assert record({}, [], {}) == {}


@pytest.mark.parametrize("profile", [{}, {"context": 1, "passes": {"1": {"median": 1}}}, [], {**PROFILE, "drafts": 3}])
def test_bad_profiles(trace: Trace, profile: Any) -> None:
    with pytest.raises(OptionError, match="not a profile"):
        terms_of("bad", profile, trace)


def test_files(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    trace.write(path)
    assert read_trace(path) == json_round(trace)
    assert list(tmp_path.iterdir()) == [path]
    lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    newer = json.dumps(json.loads(lines[0]) | {"format": 99}).encode() + b"\n"
    for data, part in ((lines[1], "damaged"), (newer, "format 99"), (b"", "damaged")):
        path.write_bytes(gzip.compress(data))
        with pytest.raises(DataError, match=part):
            read_trace(path)
    path.write_bytes(b"nothing")
    with pytest.raises(DataError, match="is not a trace"):
        read_trace(path)
    for missing in (str(tmp_path / "missing.json"), "~nosuchuser/missing.json"):
        with pytest.raises(OptionError, match="no profile"):
            load_profile(missing)
    for text in ("{", "[" * 100_000, "9" * 5000):
        path.write_text(text)
        with pytest.raises(OptionError, match="damaged"):
            load_profile(str(path))


def head(**changes: Any) -> Any:
    return lambda lines: [lines[0] | changes, *lines[1:]]


def first_text(**changes: Any) -> Any:
    return lambda lines: [lines[0], lines[1] | changes, *lines[2:]]


def drafts_with(**values: Any) -> Any:
    """With these in place of the first of each list that has some."""

    def changed(draft: dict[str, Any]) -> dict[str, Any]:
        return draft | {name: [value, *draft[name][1:]] for name, value in values.items() if draft[name]}

    return lambda lines: [
        lines[0],
        lines[1] | {"drafts": {name: [changed(one) for one in found] for name, found in lines[1]["drafts"].items()}},
    ]


@pytest.mark.parametrize(
    "change",
    {
        "no texts": lambda lines: lines[:1],
        "no such source": first_text(drafts={}),
        "fewer drafts": lambda lines: [
            lines[0],
            lines[1] | {"drafts": {name: found[:5] for name, found in lines[1]["drafts"].items()}},
        ],
        "half a draft": lambda lines: [
            lines[0],
            lines[1]
            | {
                "drafts": {
                    name: [one | {"parents": [0] * 99} for one in found] for name, found in lines[1]["drafts"].items()
                }
            },
        ],
        "no number for a score": drafts_with(scores="x"),
        "a list for a parent": drafts_with(parents=[0]),
        "half a node for a parent": drafts_with(parents=0.5),
        "a parent that comes later": drafts_with(parents=1),
        "a list for a token": drafts_with(tokens=[]),
        "no numbers for beliefs": drafts_with(beliefs=["x", "y"]),
        "an empty belief": drafts_with(beliefs=[]),
        "a seed that is none": first_text(seed=[]),
        "a number for the task": first_text(task=3),
        "no output": first_text(output=[]),
        "no prompt": first_text(prompt=[]),
        "no ids": first_text(output=["a"] * NEW),
        "nothing measured": head(measured={}),
        "no plain decoding": head(measured={"suffix": {"chat": {"tokens": 9, "rounds": 9, "seconds": 1.0}}}),
        "no tokens": head(measured={"ar": {"chat": {"tokens": 0, "rounds": 9, "seconds": 1.0}}}),
        "no tasks": head(measured={"ar": {}}),
        "no profile": head(profile={}),
        "an endless profile": head(profile={"context": float("inf"), "passes": PROFILE["passes"]}),
        "no overhead": head(overhead=None),
        "no parts": head(parts={"auto": ["nobody"]}),
        "a number for the vocabulary": head(vocab="257"),
    }.values(),
)
def test_incomplete_traces(trace: Trace, tmp_path: Path, change: Any) -> None:
    path = tmp_path / "trace.jsonl.gz"
    trace.write(path)
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in change(lines)).encode()))
    with pytest.raises(DataError, match="is not a trace of paceline bench --trace, or it is damaged") as refused:
        read_trace(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": %s}' % ("9" * 5000)])
def test_traces_that_python_does_not_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(DataError, match="damaged"):
        read_trace(path)
    path.write_bytes(gzip.compress(b"x" * 9999)[:10] + b"nothing that was compressed")
    with pytest.raises(DataError, match="is not a trace"):
        read_trace(path)


def json_round(trace: Trace) -> Trace:
    """What JSON leaves of it: no tuples."""
    return Trace(trace.header, [TracedText(**{**vars(text), "prompt": list(text.prompt)}) for text in trace.texts])


def test_a_text_that_was_not_traced(trace: Trace) -> None:
    target: Any = project_module.RecordedTarget(trace, Costs({1: 1.0, 2: 2.0}), MadeUpClock())
    source = project_module.Recorded(trace, "suffix", target)
    row: Any = type("Row", (), {"ids": [1, 2, 3, 4]})
    with pytest.raises(DataError, match="texts of its trace"):
        source.find(row)


@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=40))
def test_a_distribution_by_its_largest_and_its_entropy(weights: list[float]) -> None:
    q = torch.tensor(weights, dtype=torch.float64)
    q = (q / q.sum()).sort(descending=True).values
    entropy = float(torch.special.entr(q).sum())
    made = distribution((*q[:4].tolist(), entropy)).double()
    assert float(made.sum()) == pytest.approx(1.0, abs=1e-4)
    assert made[: min(4, len(q))].tolist() == pytest.approx(q[:4].tolist(), abs=1e-6)
    assert float(torch.special.entr(made).sum()) == pytest.approx(entropy, abs=0.15 + 0.1 * math.log(len(q)))


def test_a_clock_for_as_long_as_it_is_wanted() -> None:
    with made_up(MadeUpClock()) as clock:
        assert now() == 0
        clock.spend(2.5)
        assert now() == 2.5
    assert now() != 2.5
