"""The check that figures of pages are in files of results."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from paceline.bench.journal import Run
from paceline.bench.metrics import results

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def check() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return importlib.import_module("check_figures")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Results of `ar` and `d`, which is 1.6 times as fast; and a file of some numbers."""
    runs = [
        Run([[1] * 10], seconds, 5, method=name, temperature=0.0, task="qa", ids=["1"], turn=0, prompt_tokens=[1])
        for name, seconds in (("ar", 2.0), ("d", 1.25))
    ]
    (tmp_path / "run").mkdir()
    rows = results(runs, [], ["ar", "d"], 1)
    (tmp_path / "run/results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run/config.json").write_text("{}")
    (tmp_path / "some.json").write_text('{"found": [{"tau": 1.2345, "tokens": 2960000}], "shown": true}')
    return tmp_path


def said(
    check: ModuleType, root: Path, comment: str, *rows: str, head: str = "| method | tokens/s | x `ar` |"
) -> list[str]:
    page = "\n".join(
        [comment, "", head, "| --- | --: | --: |", *rows, "", "| a | table |", "| --- | --- |", "| x | y |"]
    )
    return [problem for found in check.tables(page) for problem in check.problems(found, root)]


def test_columns_are_those_of_the_results(check: ModuleType, root: Path) -> None:
    comment = "<!-- figures: run -->"
    assert said(check, root, comment, "| `ar` | 5.0 | 1.00 |", "| `d` | 8.0 | 1.60 |") == []
    assert said(check, root, comment, "| `d` | 8.0 | 1.60 |") == []  # not all rows need be there
    wrong = said(check, root, comment, "| `ar` | 5.0 | 1.00 |", "| `d` | 8.0 | 1.61 |")
    assert wrong == ["the column 'x `ar`' is not made of run"]
    swapped = said(check, root, comment, "| `d` | 5.0 | 1.00 |", "| `ar` | 8.0 | 1.60 |")
    assert len(swapped) == 2


def test_figures_are_numbers_of_the_file(check: ModuleType, root: Path) -> None:
    comment = "<!-- figures: some.json -->"
    assert said(check, root, comment, "| `x` | 1.23 (1.2) | 2.96 M |") == []
    assert said(check, root, comment, "| `x` | 1.24 | 2.96 |") == ["1.24 is not in some.json"]
    assert said(check, root, comment, "| 0.5 | 1.23 | 1.2345 |") == []  # what a row is called is not measured


def test_what_a_paper_says_is_not_looked_for(check: ModuleType, root: Path) -> None:
    head = "| `x` | paper: 70B | paper: 13B | here |"
    row = "| `x` | 2.29 | 2.04 | 1.23 |"
    assert said(check, root, "<!-- figures: some.json -->", row, row, head=head) == []
    wrong = said(check, root, "<!-- figures: some.json -->", row.replace("1.23", "1.24 (1.2)"), head=head)
    assert wrong == ["1.24 is not in some.json"]


def test_every_table_says_where_its_figures_are_from(check: ModuleType, root: Path) -> None:
    row = "| `x` | 1.24 | 2.96 |"
    [problem] = said(check, root, "Some text.", row)
    assert "nothing says where its figures are from" in problem
    assert said(check, root, "<!-- figures: missing.json -->", row) == ["there is no missing.json"]
    assert said(check, root, "<!-- figures by: make it -->", row) == []
    assert said(check, root, "<!-- figures: none -->", row) == []
    assert said(check, root, "", row, head="| option | default | |") == []
    assert said(check, root, "", "| `x` | 1 | 2 |") == []


def test_pages_are_named_with_lines(check: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = root / "page.md"
    page.write_text("# Page\n\n| a | b |\n| --- | --- |\n| x | 1.5 and 2.5 |\n")
    monkeypatch.setattr(sys, "argv", ["check_figures.py", str(page)])
    with pytest.raises(SystemExit, match=r"page\.md:3: nothing says"):
        check.main()
    page.write_text("# Page\n")
    check.main()


def test_readme_agrees_with_its_results(check: ModuleType) -> None:
    """All other pages are looked at by `make lint`."""
    readme = (ROOT / "README.md").read_text()
    [table] = [found for found in check.tables(readme) if found.comment]
    assert list(check.problems(table, ROOT)) == []
    table.rows[2][1] = "99.9"
    assert list(check.problems(table, ROOT)) == [
        "the column 'torch: tokens/s' is not made of benchmarks/results/readme"
    ]
