"""What `paceline tune` keeps: who takes it, and what becomes of files that cannot be true here."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import paceline
from helpers import one_thread  # noqa: F401
from paceline.bench.suites import Prompt
from paceline.bench.tune import Tuning, tune
from paceline.drafters.merge import Merge
from paceline.errors import OptionError
from paceline.profiling.tuned import Tuned, kept_gates, tuned_for
from paceline.targets import Target, costs
from paceline.targets.cost_model import Costs
from paceline.targets.costs import known_costs, set_costs, settings_path, stored_passes
from paceline.targets.machine import this_machine
from paceline.targets.reference import as_target
from tiny import byte_tokenizer, small_llama

PASSES = {"context": 64, "passes": {"1": {"median": 1.0}, "8": {"median": 1.4}}}
METHOD = "merge:drafters=suffix|prompt-lookup"


def loaded(drafter: str = METHOD, **options: Any) -> paceline.LLM:
    return paceline.load(small_llama(), tokenizer=byte_tokenizer(), drafter=drafter, **options)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Tuning:
    """Of prompts that repeat themselves, and one that the model cannot read."""
    prompts = [Prompt(str(n), "chat", ("ab ab ab ab " * n,)) for n in (1, 3, 99)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("paceline.bench.tune.REPEATS", 1)
        patch.setattr("paceline.bench.tune.WIDTHS", (1, 8))
        return tune(loaded(), prompts, max_new_tokens=24)


@pytest.fixture
def tuning(once: Tuning, cache_dir: Path) -> Tuning:
    """The same, in a cache of the test's own."""
    path = cache_dir / "tuned" / once.path.name
    path.parent.mkdir(parents=True)
    path.write_bytes(once.path.read_bytes())
    return replace(once, path=path)


def test_later_loads_start_from_it(tuning: Tuning) -> None:
    assert tuning.path.is_file()
    assert list(tuning.path.parent.iterdir()) == [tuning.path]
    assert sum(tuning.sources.values()) == 48
    assert tuning.tau >= 1
    stored = json.loads(tuning.path.read_text())
    assert (stored["prompts"], stored["machine"]) == (2, this_machine())

    llm = loaded()
    assert llm.tuned
    assert llm.drafter.calibration.kept() == stored["calibration"] != []
    assert kept_gates(llm.drafter) == stored["gates"]
    assert stored["gates"].keys() == {"suffix", "prompt-lookup"}
    assert known_costs(llm.target) is not None
    other = llm.method("suffix")
    assert other.tuned is llm.tuned
    assert other.drafter.calibration.kept() == stored["calibration"]

    fresh = loaded(fresh=True)
    assert fresh.tuned is None
    assert fresh.drafter.calibration.kept() == []
    prompt: dict[str, Any] = {"prompt": "ab ab ab", "max_new_tokens": 24, "eos": ()}
    assert llm.generate(**prompt).tokens == fresh.generate(**prompt).tokens


def test_costs_that_were_learned_meanwhile_stay(tuning: Tuning) -> None:
    llm = loaded(fresh=True)
    own = set_costs(llm.target, Costs({1: 3.0, 2: 4.0}))
    found = tuned_for(llm.target)
    assert found
    found.apply(llm.target, llm.drafter)
    assert known_costs(llm.target) is own


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ("{ not JSON", "it is damaged"),
        ("[]", "it is damaged"),
        ("[" * 100_000, "it is nested too deeply"),
        ("9" * 5000, "too many digits"),
        ("{}", "it has no 'format'"),
        ({"format": 9}, "it has format 9"),
        ({"machine": "a toaster, 1 CPU"}, "another machine, a toaster"),
        ({"calibration": [["suffix", 0, -1.0, 2.0]]}, "counts are 0 or more"),
        ({"calibration": [["suffix", 0]]}, "unpack"),
        ({"gates": {"suffix": [[1.0, 2.0]]}}, "a gate has"),
        ({"profile": {"context": 1, "passes": {"1": {"median": -1.0}, "2": {"median": 1.0}}}}, "above 0"),
        ({"speedup": 0.0}, "a speedup is above 0"),
        ({"speedup": None}, "it is damaged"),
        ({"more": 1}, "it is damaged"),
    ],
)
def test_files_that_are_not_used(tuning: Tuning, changes: Any, part: str, caplog: pytest.LogCaptureFixture) -> None:
    good = json.loads(tuning.path.read_text())
    tuning.path.write_text(changes if isinstance(changes, str) else json.dumps(good | changes))
    with caplog.at_level(logging.WARNING):
        llm = loaded()
    assert llm.tuned is None
    [said] = [record.getMessage() for record in caplog.records]
    assert part in said
    assert "run it again" in said
    assert "\n" not in said


def test_no_prompt_fits(cache_dir: Path) -> None:
    with pytest.raises(OptionError, match="no prompt fits"):
        tune(loaded(), [Prompt("1", "chat", ("ab" * 999,))])
    assert not cache_dir.exists()


def test_a_drafter_without_gates(tuning: Tuning) -> None:
    llm = loaded("suffix", fresh=True)
    assert not isinstance(llm.drafter, Merge)
    assert kept_gates(llm.drafter) == {}
    Tuned(this_machine(), 1, "now", 1.0, PASSES, [["suffix", 1, 1.0, 2.0]], {}).apply(llm.target, llm.drafter)
    assert llm.drafter.calibration.kept() == [["suffix", 1, 1.0, 2.0]]


@pytest.fixture
def target(cache_dir: Path) -> Target:
    return as_target(small_llama())


@pytest.mark.parametrize(
    ("profile", "part"),
    [
        ("{", "it is damaged"),
        ("[" * 100_000, "it is nested too deeply"),
        ("9" * 5000, "too many digits"),
        (json.dumps(PASSES | {"context": float("inf")}), "finite"),
        (json.dumps({"context": 64}), "it has no 'passes'"),
        (json.dumps(PASSES | {"passes": {"1": {"median": 0.0}, "2": {"median": 1.0}}}), "above 0"),
        (json.dumps(PASSES | {"machine": "a toaster"}), "another machine, a toaster"),
        (json.dumps([1]), "it is damaged"),
    ],
)
def test_bad_profiles_are_told_and_measured_anew(
    target: Target, profile: str, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = settings_path("profiles", target)
    path.parent.mkdir(parents=True)
    path.write_text(profile)
    with caplog.at_level(logging.WARNING):
        found = costs.costs_of(target)
    assert found(64) == 1.5  # as measured: see `steady_costs`
    [said] = [record.getMessage() for record in caplog.records]
    assert part in said
    assert "measured anew" in said


def test_a_good_profile(target: Target) -> None:
    path = settings_path("profiles", target)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(PASSES | {"machine": this_machine()}))
    assert stored_passes(target) == {64: {1: 1.0, 8: 1.4}}
