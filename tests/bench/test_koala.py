"""`benchmarks/koala.py` on a tiny model."""

from __future__ import annotations

import json
import runpy
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import one_thread  # noqa: F401
from paceline.cli import main

Run = Callable[..., str]
PROGRAMS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache_dir: Path) -> Run:
    """`run("table", …)`: what it prints."""

    def run(*words: object) -> str:
        monkeypatch.syspath_prepend(PROGRAMS)
        monkeypatch.setattr(sys, "argv", ["koala", *map(str, words)])
        capsys.readouterr()
        runpy.run_path(str(PROGRAMS / "koala.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def rows(out: str) -> list[list[str]]:
    lines = [line for line in out.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_trained_named_benchmarked_and_told(
    run: Run, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(20)))
    data, out, results = tmp_path / "data", tmp_path / "heads", tmp_path / "results"
    made = ["train", "data", "-m", tiny_model_dir, "-p", prompts, "-o", data, "-n", 12, "-b", 10]
    assert main(list(map(str, made))) == 0
    trained: list[str] = []

    def call(words: list[str]) -> int:
        trained.append(Path(words[words.index("--out") + 1]).name)
        return main(words[3:])

    monkeypatch.setattr(subprocess, "call", call)
    words = ["train", "--model", tiny_model_dir, "--data", data, "--out", out, "--kinds", "eagle", "--layers", "1"]
    options = ["--", "--vocab", 60, "--device", "cpu", "--steps", 1, "--tokens", 300, "--held-back", 4]
    run(*words, "--adversarial", "0,0.1", *options)
    assert trained == ["eagle-k1-s0", "eagle-k1-adv0.1-low-cost-s0"]
    run(*words, "--adversarial", "0", "--seeds", "0,1", *options)
    assert trained[2:] == ["eagle-k1-s1"]
    with pytest.raises(SystemExit, match="trained by another command"):
        run(*words, "--adversarial", "0", *options, "--lr", 1)

    methods = run("methods", "--out", out).strip()
    assert methods.split(",")[:2] == ["ar", f"eagle:head={out}/eagle-k1-s0+fixed:k=4"]
    suite = tmp_path / "suite.jsonl"
    suite.write_text(json.dumps({"id": "a", "task": "chat", "turns": ["hello there"]}) + "\n")
    bench = ["bench", "-m", tiny_model_dir, "--suite", suite, "--methods", methods, "-n", 8, "--out", results]
    assert main(list(map(str, bench))) == 0

    measurements = results / "results.jsonl"  # by hand, as nothing is accepted here
    lines = [json.loads(line) | {"tau": 1.0 + at} for at, line in enumerate(measurements.read_text().splitlines())]
    measurements.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = run("table", "--out", out, "--results", results)
    plain, adversarial, gained, chains, _ = rows(told)
    assert plain[:5] == ["`eagle`", "1", "0", "", "2"]
    assert adversarial[:5] == ["`eagle`", "1", "0.1", "low-cost", "1"]
    measured = [json.loads((out / f"eagle-k1-s{s}" / "eagle.json").read_text())["trained"]["measured"] for s in (0, 1)]
    loss = sum(m["held_back_loss"] for m in measured) / 2
    assert float(plain[-1].split(" ± ")[0]) == pytest.approx(loss, abs=6e-4)
    played = json.loads((out / "eagle-k1-adv0.1-low-cost-s0" / "eagle.json").read_text())["trained"]["measured"]
    assert gained[:5] == adversarial[:5]
    assert float(gained[-3]) == pytest.approx(played["held_back_loss"] - measured[0]["held_back_loss"], abs=6e-5)
    assert float(gained[-2]) == pytest.approx(played["discriminator_accuracy"], abs=6e-4)
    assert float(gained[-1]) == pytest.approx(played["adversarial_held_back_loss"], abs=6e-4)
    assert chains[:6] == ["`eagle`", "1", "0", "", "2", "chain"]
    folders = [f"eagle-k1-s{seed}+" for seed in (0, 1)]
    taus = [row["tau"] for name in folders for row in lines if name in row["method"] and row["task"] == "overall"]
    assert chains[-2] == f"{statistics.mean(taus):.2f} ± {statistics.stdev(taus):.2f}"
    assert len(taus) == 2
