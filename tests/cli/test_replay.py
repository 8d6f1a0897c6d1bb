"""From a benchmark to a trace, and from there to other machines; and `paceline tune`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from helpers import one_thread  # noqa: F401
from paceline.profiling.shipped import FOLDER
from paceline.profiling.trace import read_trace


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    file = tmp_path / "suite.jsonl"
    rows = [{"id": f"{task}{i}", "task": task, "turns": ["ab ab ab " * i]} for task in "xy" for i in (1, 2)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_trace_and_its_replays(run, tiny_model_dir, suite, tmp_path, monkeypatch):
    methods = "ar,prompt-lookup:budget=4+fixed:k=3,suffix:budget=4+fixed:k=2"
    words = ["bench", "-m", tiny_model_dir, "--suite", suite, "--out", tmp_path / "out", "-n", 12, "--methods", methods]
    words += ["--tier", "torch"]
    code, out, _ = run(*words, "--json")
    assert code == 0
    rows = {row["method"]: row for row in json.loads(out)["rows"] if row["task"] == "overall"}
    trace = tmp_path / "out" / "trace.jsonl.gz"
    assert not trace.exists()
    code, _, _ = run(*words, "--trace")  # a run that ended gets its trace later on
    assert code == 0
    assert trace.exists()

    code, out, _ = run("replay", trace, "--profile", "h200-llama-8b", "--json")
    assert code == 0
    found = {row["method"]: row for row in json.loads(out)["rows"]}
    assert found.keys() == rows.keys()
    for method, row in found.items():
        assert row["here"]["tau"] == pytest.approx(rows[method]["tau"])
        assert row["measured"] > 0
    assert found["ar"]["here"]["speedup"] == found["ar"]["measured"] == 1
    flat = found["suffix:budget=4+fixed:k=2"]
    assert flat["h200-llama-8b"]["speedup"] == pytest.approx(flat["here"]["tau"], rel=0.1)

    code, out, _ = run("replay", trace, "--profile", "h200-llama-8b", "--methods", "ar,suffix:budget=4+fixed:k=1")
    assert code == 0
    assert "projections" in out
    assert "suffix:budget=4" in out

    known = read_trace(trace)
    known.header.measured["suffix:budget=4+disco"] = known.header.measured["ar"]
    known.write(tmp_path / "disco.jsonl.gz")
    code, out, err = run("replay", tmp_path / "disco.jsonl.gz", "--json")  # of those measured what can be replayed
    assert code == 0
    assert len(json.loads(out)["rows"]) == len(rows)
    assert "without suffix:budget=4+disco: " in err

    monkeypatch.setenv("COLUMNS", "20")  # no room for a table
    code, out, _ = run("replay", trace, "--methods", "ar,suffix:budget=4+fixed:k=2")
    assert code == 0
    assert out.startswith(
        "ar\n  measured 1.00\n  predicted 1.00\n  off by +0.0%\n  tau 1.00\nsuffix:budget=4+fixed:k=2\n"
    )

    for name in ("here", "measured", "h200-llama-8b"):
        copy = tmp_path / f"{name}.json"
        shutil.copy(FOLDER / "h200-llama-8b.json", copy)
        code, out, err = run("replay", trace, "--profile", copy, "--profile", "h200-llama-8b")
        assert (code, out) == (1, "")
        assert "profiles need names of their own" in err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("{suite}",), "is not a trace"),
        (("missing.gz",), "cannot read missing.gz: no such file"),
    ],
)
def test_no_trace(run, suite, words, part):
    code, out, err = run("replay", *(word.format(suite=suite) for word in words))
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert part in err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--methods", "suffix"), "needs the method ar"),
        (("--methods", "ar,suffix", "--temperature", "0.5"), "greedy"),
        (("--methods", "ar,suffix", "--batch", "2"), "batch 1"),
    ],
)
def test_runs_without_a_trace(run, tiny_model_dir, suite, tmp_path, words, part):
    code, _, err = run("bench", "-m", tiny_model_dir, "--suite", suite, "--out", tmp_path / "out", "--trace", *words)
    assert code == 1
    assert part in err
    assert not (tmp_path / "out").exists()


def test_tune(run, tiny_model_dir, suite, monkeypatch):
    monkeypatch.setattr("paceline.bench.tune.WIDTHS", (1, 8))
    words = ["-m", tiny_model_dir, "--tier", "torch"]
    code, out, err = run("tune", *words, "--prompts", suite, "--limit", 1, "-n", 8)
    assert code == 0
    assert "plain decoding" in out
    assert "stored in" in err
    code, out, err = run("generate", *words, "ab ab", "-n", 4, "--json")
    assert code == 0
    assert err.startswith("tuned on 2 prompts, ")
    code, _, err = run("generate", *words, "ab ab", "-n", 999)
    assert (code, err.count("\n")) == (1, 1)  # the error alone
    assert "new tokens" in err
    code, again, err = run("generate", *words, "ab ab", "-n", 4, "--json", "--fresh")
    assert (code, err) == (0, "")
    assert json.loads(again)["tokens"] == json.loads(out)["tokens"]
    code, out, _ = run("tune", *words, "--prompts", suite, "--limit", 1, "-n", 4, "--json")
    assert json.loads(out).keys() == {"path", "plain", "auto", "tau", "sources"}
