"""`benchmarks/history`: rows of releases, from results and from comparisons, and what is made of them."""

from __future__ import annotations

import importlib
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def releases() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return importlib.import_module("releases")


def results(folder: Path, tier: str, version: str, speeds: dict[str, float]) -> None:
    """As `paceline bench` leaves them, as far as it matters."""
    (folder / tier).mkdir(parents=True)
    machine = {"cpu": "A", "cores": 2, "threads": 2, "torch": "2", "transformers": "5", "paceline": version, "more": 1}
    settings = {"model": "m", "suite": "s.jsonl", "prompts": 3, "max_new_tokens": 8}
    config = {"machine": machine, "settings": settings, "date": "2026-01-02T03:04:05"}
    (folder / tier / "config.json").write_text(json.dumps(config))
    rows = [
        {"method": method, "task": task, "temperature": temperature, "speedup_ar": ratio * (task == "overall")}
        for method, ratio in speeds.items()
        for task in ("overall", "qa")
        for temperature in (0, 0.7)
    ]
    (folder / tier / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    folder = tmp_path / "measured"
    results(folder, "torch", "0.3.0", {"ar": 1.0, "hf": 0.5, "auto": 1.98765})
    results(folder, "native", "0.3.0", {"ar": 1.0, "hf": 0.1, "auto": 1.2, "eagle": 1.1})
    return folder


def run(releases: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["releases.py", *map(str, words)])
    releases.main()


def test_a_row_of_results(
    releases: ModuleType,
    measured: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = tmp_path / "rows.jsonl"
    run(releases, monkeypatch, "add", measured, "--rows", rows)
    [row] = releases.read(rows)
    assert (row["release"], row["against"], row["date"]) == ("0.3.0", "ar", "2026-01-02")
    assert row["machine"] == {"cpu": "A", "cores": 2, "threads": 2, "torch": "2", "transformers": "5"}
    assert row["ratios"]["torch"] == {"hf": 0.5, "auto": 1.988}
    with pytest.raises(SystemExit, match=r"has a row of 0\.3\.0 already"):
        run(releases, monkeypatch, "add", measured, "--rows", rows)
    run(releases, monkeypatch, "table", "--rows", rows)
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| 0.3.0 | torch | 2026-01-02, A, 2 threads | 0.50 | 1.99 |  |",
        "| 0.3.0 | native | 2026-01-02, A, 2 threads | 0.10 | 1.20 | 1.10 |",
    ]


def test_tiers_of_different_versions_make_no_row(releases: ModuleType, tmp_path: Path) -> None:
    results(tmp_path, "torch", "0.3.0", {"ar": 1.0})
    results(tmp_path, "native", "0.2.0", {"ar": 1.0})
    with pytest.raises(SystemExit, match=r"different versions, 0\.2\.0 and 0\.3\.0"):
        releases.of_results(tmp_path)


def test_rows_that_are_not_there(releases: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = tmp_path / "absent" / "rows.jsonl"
    with pytest.raises(SystemExit, match=f"there is no {absent}"):
        run(releases, monkeypatch, "table", "--rows", absent)
    with pytest.raises(SystemExit, match=f"cannot write {absent}"):
        releases.append({"against": "v0", "release": "x"}, absent)
    with pytest.raises(SystemExit, match="has no complete results"):
        run(releases, monkeypatch, "add", tmp_path, "--rows", absent)
    with pytest.raises(SystemExit):
        run(releases, monkeypatch, "add")


def test_a_comparison_has_the_same_form(releases: ModuleType, measured: Path, tmp_path: Path) -> None:
    options = {"names": ["abc-dirty", "v0.2.0"], "model": "m", "tokens": 64, "prompts": ROOT / "benchmarks/s.jsonl"}
    row = releases.of_comparison(Namespace(**options), 6, {"native": {"none": 1.0004}})
    assert (row["release"], row["against"], row["suite"]) == ("abc-dirty", "v0.2.0", "benchmarks/s.jsonl")
    assert row["ratios"] == {"native": {"none": 1.0}}
    assert set(row) == set(releases.of_results(measured)) - {"source"}


def test_plot(releases: ModuleType, measured: Path, tmp_path: Path) -> None:
    """The same rows, the same file; transformers' own modes are not drawn."""
    pytest.importorskip("matplotlib")
    older = releases.of_results(measured) | {"release": "0.2.0", "ratios": {"native": {"hf": 0.1, "trigram": 1.1}}}
    drawn = []
    for name in ("a.svg", "b.svg"):
        releases.plot([older, releases.of_results(measured)], tmp_path / name)
        drawn.append((tmp_path / name).read_bytes())
    assert drawn[0] == drawn[1]
    assert b"<!-- trigram -->" in drawn[0]
    assert b"<!-- hf -->" not in drawn[0]


def test_committed_rows_are_what_the_results_say(releases: ModuleType) -> None:
    """As long as they are there: the next release's take their place."""
    rows = releases.read()
    assert len({row["release"] for row in rows}) == len(rows)
    now = releases.of_results(ROOT / "benchmarks" / "results" / "readme")
    same = ("release", "date")
    assert all(row == now for row in rows if [row[key] for key in same] == [now[key] for key in same])
    assert releases.markdown(rows) in (ROOT / "docs" / "history.md").read_text(encoding="utf-8")
