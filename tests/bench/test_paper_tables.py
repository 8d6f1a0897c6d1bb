"""The programs in `benchmarks/` that print a paper's tables, on made-up results."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.bench import journal
from paceline.bench.methods import check_method
from paceline.bench.metrics import results
from paceline.decoding.stats import PHASES

Run = Callable[..., str]
PROGRAMS = Path(__file__).parents[2] / "benchmarks"
SECONDS = {"ar": 2.0, "hf": 4.0, "d+fixed:k=2": 1.25, "d+fixed:k=3": 1.0, "d+beta-ts": 0.8}
LENGTHS = {
    "d+fixed:k=3": 50.0,
    "d+max-confidence:k_max=3": 55.0,
    "d+adaedl:k_max=3": 60.0,
    "d+adaedl": 70.0,  # k_max is 7
    "d+adaedl:threshold=0.2": 71.0,
    "d+adaedl:threshold=0.6": 65.0,
}


def made_up(method: str, seconds: float, temperature: float = 0.0, task: str = "qa") -> journal.Run:
    """Ten tokens; drafters have six rounds of one drafted token, of which four are accepted."""
    drafter = method not in ("ar", "hf")
    split = dict(zip(PHASES, (0.25 * seconds, 0.5 * seconds, 0.125 * seconds, 0.125 * seconds), strict=True))
    return journal.Run(
        [list(range(10))],
        seconds,
        passes=6 if drafter else 10,
        rounds=[[(1, 1, 1, 2)] * 4 + [(1, 1, 0, 1)] * 2] if drafter else [[(0, 0, 0, 1)] * 10],
        split=None if method == "hf" else split,
        method=method,
        temperature=temperature,
        task=task,
        ids=["1"],
        turn=0,
        prompt_tokens=[3],
    )


def folder(path: Path, runs: list[journal.Run]) -> Path:
    names = list(dict.fromkeys(run.method for run in runs))
    rows = results(runs, [], names, 1)
    (path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"model": "tiny", "max_new_tokens": 10, "batch": 1, "seed": 0}
    machine = {"cpu": "a CPU", "threads": 2, "torch": "2"}
    config = {"settings": settings, "machine": machine, "date": "2026-01-01T00:00", "tier": "torch", "dtype": "float32"}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("early_exit.py", folder)`: what the program prints."""

    def run(program: str, *words: object) -> str:
        monkeypatch.syspath_prepend(PROGRAMS)
        monkeypatch.setattr(sys, "argv", [program, *map(str, words)])
        runpy.run_path(str(PROGRAMS / program), run_name="__main__")
        return capsys.readouterr().out

    return run


def cells(text: str, start: str) -> list[list[str]]:
    """Rows of the tables whose first cells are `start`."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [row[1:] for row in rows if row[0] == start]


def test_eesd(run: Run, tmp_path: Path) -> None:
    runs = [made_up(name, seconds) for name, seconds in SECONDS.items()]
    runs += [made_up(name, 2.0, task="rag") for name in SECONDS]
    told = run("early_exit.py", folder(tmp_path, runs), "--task", "qa")
    assert "## Greedy, 2 prompts" in told
    speedup, acceptance, split, predicted, ratio = cells(told, "`d+beta-ts`")
    assert speedup == ["2.50 (50)"]  # v_d = 4 / 6, r_d = 4 / 10: HM = 50 %
    assert acceptance == ["0.67", "0.40", "50.0", "1.67", "0.80", "12.5", "2.50"]
    assert split == ["0.2 (25%)", "0.4 (50%)", "0.1 (12%)", "0.1 (12%)", "0.8"]
    # alpha = (0.2 / 6) / (1 / 10) = 1/3: 1 / (1/3 * 0.6 + 0.6)
    assert predicted == ["1.25", "2.50", "2.00"]
    assert ratio == ["1.250"]
    assert cells(told, "`d+fixed`") == [["2.00 (K = 3)"]]
    assert cells(told, "`hf`")[2] == ["", "", "", "", "4.0"]
    whole = run("early_exit.py", tmp_path)
    assert cells(whole, "`d+fixed`") == [["1.33 (K = 3)", "2.00 (K = 3)", "1.00 (K = 2)"]]


def test_adaedl(run: Run, tmp_path: Path) -> None:
    runs = [made_up("ar", 0.25, t) for t in (0.7, 1.0)]
    runs += [made_up(name, 10 / (speed + 10 * t), t) for name, speed in LENGTHS.items() for t in (0.7, 1.0)]
    told = run("adaedl.py", folder(tmp_path, runs), "--plot", tmp_path / "plot.png")
    assert "`d`, overall" in told
    assert cells(told, "3") == [
        ["`fixed`", "57.0", "60.0"],
        ["`max-confidence`", "62.0 (+9 %)", "65.0 (+8 %)"],
        ["`adaedl`", "67.0 (+18 %)", "70.0 (+17 %)"],
    ]
    assert cells(told, "7")[2] == ["`adaedl`", "77.0", "80.0"]
    assert cells(told, "") == [["`ar`", "40.0", "40.0"]]
    assert cells(told, "`adaedl`") == [["7", "0.2", "78.0", "81.0"], ["7", "0.6", "72.0", "75.0"]]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "count"),
    [(["early_exit.py", "methods"], 15), (["adaedl.py", "methods"], 10), (["adaedl.py", "methods", "--lambdas"], 16)],
)
def test_methods_can_be_measured(run: Run, words: list[str], count: int) -> None:
    names = run(*words).strip().split(",")
    assert len(names) == len(set(names)) == count
    for name in names:
        check_method(name)


@pytest.mark.parametrize("program", ["early_exit.py", "adaedl.py"])
def test_no_results(run: Run, program: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"{tmp_path} has no complete results of paceline bench"):
        run(program, tmp_path)


def test_no_such_task(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("early_exit.py", folder(tmp_path, [made_up("ar", 1.0)]), "--task", "poetry")
    assert "there is no task poetry; there are overall, qa" in capsys.readouterr().err
