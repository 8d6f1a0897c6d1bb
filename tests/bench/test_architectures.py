"""`benchmarks/architectures.py`, which writes docs/coverage.md, on one architecture of each kind."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from helpers import one_thread  # noqa: F401
from paceline.errors import UnsupportedModel

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def coverage() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        # Under another name: there is a package "coverage".
        spec: Any = spec_from_file_location("coverage_page", ROOT / "benchmarks" / "architectures.py")
        coverage: Any = module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, coverage)
        spec.loader.exec_module(coverage)
        patch.setattr(coverage, "DRAFTERS", ("prompt-lookup:branches=2", "siblings"))
        patch.setattr(coverage, "NEW", 10)
        yield coverage


@pytest.mark.parametrize(
    ("kind", "marks"),
    [
        ("qwen2", {"blocks": True}),
        ("mixtral", {"windows": True}),
        ("gemma3_text", {"windows": True}),
        ("deepseek_v3", {}),
        ("qwen3_next", {"chains": True}),
        ("bart", {"chains": True}),
        ("openai-gpt", {"outcome": "refused"}),
    ],
)
def test_one_of_each_kind(coverage: Any, kind: str, marks: dict[str, Any]) -> None:
    finding = coverage.examine(kind)
    expected = {"outcome": "same", "windows": False, "chains": False} | marks
    assert {name: getattr(finding, name) for name in expected} == expected
    assert finding.outcome == "refused" or (finding.tier and finding.half)


def test_other_ids_are_wrong(coverage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = coverage._own
    monkeypatch.setattr(coverage, "_own", lambda model, prompt: [(token + 1) % 96 for token in own(model, prompt)])
    assert coverage.examine("qwen2").outcome == "WRONG"
    monkeypatch.setattr(coverage, "TIE", 1.0)
    assert coverage.examine("qwen2").outcome == "tie"


def test_what_goes_wrong_is_told(coverage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no")

    assert coverage._examine_in_time("nothing").outcome == "not built"
    monkeypatch.setattr(coverage, "_own", broken)
    assert coverage._examine_in_time("qwen2").note == "transformers' own generate fails: no"
    monkeypatch.setattr(coverage, "as_target", broken)
    assert coverage._examine_in_time("qwen2").outcome == "WRONG"


def test_page(coverage: Any) -> None:
    findings = [
        coverage.Finding("b", "same", "native", blocks=True, half="yes", ran=["none"]),
        coverage.Finding("a", "refused", note=str(UnsupportedModel("no | trees"))),
    ]
    text = coverage.page(findings, "command")
    assert "| run, with the ids of `generate` | 1 |" in text
    assert text.index("| a | refused |") < text.index("| b | same | native | one by one |")
    assert "no / trees" in text


def test_the_page_that_is_kept() -> None:
    """What docs/coverage.md counts is what its table says, and nothing in it is wrong."""
    text = (ROOT / "docs" / "coverage.md").read_text()
    rows = [line.split(" | ")[1] for line in text.splitlines() if re.match(r"\| [\w-]+ \| [\w ]+ \| ", line)]
    assert len(rows) > 150
    assert "WRONG" not in rows
    assert f"| run, with the ids of `generate` | {rows.count('same')} |" in text


def test_no_benchmark_hides_a_package() -> None:
    """A script's folder is searched first for modules, and numba imports `coverage` if there is one."""
    packages = {*packages_distributions(), *sys.stdlib_module_names}
    assert not packages & {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
