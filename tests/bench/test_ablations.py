"""`benchmarks/early_exit_ablations.py` on a tiny model."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import one_thread  # noqa: F401
from paceline.cli import main

Run = Callable[..., list[list[str]]]
PROGRAMS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache_dir: Path) -> Run:
    """`run("heads", …)`: the rows of the table that it prints."""

    def run(*words: object) -> list[list[str]]:
        monkeypatch.syspath_prepend(PROGRAMS)
        monkeypatch.setattr(sys, "argv", ["ablations", *map(str, words)])
        capsys.readouterr()
        runpy.run_path(str(PROGRAMS / "early_exit_ablations.py"), run_name="__main__")
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]

    return run


@pytest.fixture
def data(tiny_model_dir: Path, tmp_path: Path) -> Path:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(20)))
    command = ["train", "data", "-m", tiny_model_dir, "-p", prompts, "-o", tmp_path / "data", "-n", 12, "-b", 10]
    assert main(list(map(str, command))) == 0
    return tmp_path / "data"


def test_heads(run: Run, data: Path, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each differs from the base by what its row says; what is done is not done again."""
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"text number {i}"}) + "\n" for i in range(40)))
    trained: list[str] = []

    def call(words: list[str]) -> int:
        trained.append(Path(words[words.index("--out") + 1]).name)
        return main(words[3:])

    monkeypatch.setattr(subprocess, "call", call)
    words = ["heads", "--model", tiny_model_dir, "--data", data, "--out", tmp_path / "heads", "--layers", 1]
    words += ["--held-back", 2, "--text", text, "--only", "base", "open text only", "0 exit layers"]
    options = ["--", "--device", "cpu", "--epochs", 1, "--tokens", 400]
    rows = run(*words, *options)
    assert trained == ["base", "open-text-only", "0-exit-layers"]
    assert [row[0] for row in rows] == ["base", "open text only", "0 exit layers"]
    base, other, without = ([float(cell.replace(",", "")) for cell in row[1:]] for row in rows)
    assert base[5] == pytest.approx(1 + sum(base[:5]), abs=0.01)
    assert base[-1] == other[-1] > without[-1]  # parameters
    measured = json.loads((tmp_path / "heads" / "base" / "early-exit.json").read_text())["trained"]["measured"]
    assert base[0] == pytest.approx(measured["accepted_1"], abs=6e-4)  # on the same samples as in training
    again = run(*words, *options)
    assert again == rows
    assert len(trained) == 3


def test_policies(run: Run, tiny_model_dir: Path, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text(json.dumps({"prompt": [5, 6, 7, 5, 6], "output": [7, 5, 6] * 8}) + "\n")
    rules = ["fixed:k=3", "beta-ts", "beta-ts:literal=true", "cali-ts:predict=false"]
    words = ["--answers", answers, "--drafter", "layer-skip", "--tier", "torch", "--cost", 0.25, "--rule", *rules]
    rows = run("policies", "--model", tiny_model_dir, *words)
    assert [row[0] for row in rows] == [f"`{rule}`" for rule in rules]
    for row in rows:
        tau, v_d, r_d, _, drafted, speedup = map(float, row[1:])
        assert tau == pytest.approx(1 / (1 - r_d), rel=0.05)
        assert speedup == pytest.approx(tau / (1 + 0.25 * drafted), rel=0.02)
        assert 0 <= v_d <= 1
