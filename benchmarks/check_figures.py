"""Is every measured figure of README's and the documentation's tables in a file of results? Part of `make lint`.

    python benchmarks/check_figures.py [PAGE …]

A table with figures (numbers with a decimal point) has a comment in front of it, which says where they are from:

    <!-- figures: benchmarks/results/foundation -->           a folder: each column is one that programs here make of it
    <!-- figures: benchmarks/results/trigram/search.json -->  a file: each figure is a number of it, as printed
    <!-- figures by: COMMAND -->                              nobody has kept a file; COMMAND makes them anew
    <!-- figures: none -->                                    nothing in it was measured, or it repeats other tables

Tables whose head says "default" are of options. Columns whose head begins with "paper" quote one, and are left out.
Text between tables is not read.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import adaedl
import early_exit
import koala
import table
import target_pass_doc
from script import run_script

from paceline.bench.methods import AR
from paceline.bench.suites import OVERALL

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/**/*.md")
FIGURE = re.compile(r"(?<![\w.,])\d+\.\d+(?![\w.])")
COMMENT = re.compile(r"<!-- figures( by)?: (.+) -->")
QUOTED = "paper"
FEWEST = 2  # figures of a table that is looked at
SCALES = (1, 1e-6)  # of a file's numbers: as they are, and in millions

Row = tuple[str, ...]  # what it is called: its cells before the first figure
Column = tuple[str, frozenset[tuple[Row, str]]]  # its head and its cells, by row


class Found(NamedTuple):
    """A table of a page.

    Attributes:
        line: 1-based, of its head.
        comment: what the comment in front of it says, "" where there is none; `by` as in "figures by".
    """

    line: int
    rows: list[list[str]]  # the head first
    comment: str
    by: bool

    @property
    def figures(self) -> list[str]:
        return [figure for row in self.rows[1:] for cell in row[1:] for figure in FIGURE.findall(cell)]


def tables(text: str) -> Iterator[Found]:
    """Those of a page in Markdown."""
    lines, at, last = text.splitlines(), 0, ""
    while at < len(lines):
        start = at
        while at < len(lines) and lines[at].startswith("|"):
            at += 1
        if at - start > 2:
            rows = _without_quotes([cells(line) for line in (lines[start], *lines[start + 2 : at])])
            by, comment = found.groups() if (found := COMMENT.fullmatch(last)) else (None, "")
            yield Found(start + 1, rows, comment, bool(by))
        if at == start:
            last = lines[at].strip() or last
            at += 1
        else:
            last = ""


def _without_quotes(rows: list[list[str]]) -> list[list[str]]:
    own = [place for place, name in enumerate(rows[0]) if not (place and name.startswith(QUOTED))]
    return [[row[place] for place in own if place < len(row)] for row in rows]


def cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip("|"))]


def problems(found: Found, root: Path) -> Iterator[str]:
    """What is wrong with a table: nothing, most of the time."""
    if len(found.figures) < FEWEST or "default" in found.rows[0]:
        return
    if not found.comment:
        yield "nothing says where its figures are from: see benchmarks/check_figures.py"
    elif not found.by and found.comment != "none":
        paths = [root / name for name in found.comment.split()]
        missing = [str(path.relative_to(root)) for path in paths if not path.exists()]
        if missing:
            yield f"there is no {', '.join(missing)}"
        elif all(path.is_dir() for path in paths):
            yield from _by_column(found, paths)
        else:
            known = numbers(paths)
            yield from (f"{one} is not in {found.comment}" for one in found.figures if not _among(one, known))


def _by_column(found: Found, folders: Sequence[Path]) -> Iterator[str]:
    made = [column for folder in folders for column in columns(folder)]
    for head, own in of_table(found.rows):
        if not any(head == other and own <= cells for other, cells in made) and _measured(own):
            yield f"the column '{head}' is not made of {found.comment}"


def _measured(own: Iterable[tuple[Row, str]]) -> bool:
    return any(FIGURE.search(cell) for _, cell in own)


def of_table(rows: Sequence[Sequence[str]]) -> Iterator[Column]:
    head, *body = rows
    for place, name in enumerate(head[1:], start=1):
        yield name, frozenset((_called(row), row[place]) for row in body)


def _called(row: Sequence[str]) -> Row:
    return (row[0], *itertools.takewhile(lambda cell: not FIGURE.search(cell), row[1:]))


@cache
def columns(folder: Path) -> list[Column]:
    """All that the programs here make of a folder of results."""
    return [column for text in _rendered(folder) for found in tables(text) for column in of_table(found.rows)]


def _rendered(folder: Path) -> Iterator[str]:
    """In Markdown: as table.py, early_exit.py, adaedl.py, koala.py and target_pass_doc.py print them."""
    if (folder / "results.jsonl").exists():
        yield from _of_bench(table.read(folder)[1])
    elif (folder / "native").is_dir():
        yield table.side_by_side([table.read(folder / tier) for tier in ("torch", "native")], OVERALL)
    else:
        for name, make in target_pass_doc.MAKERS.items():
            if (path := folder / f"{name}.json").exists():
                yield make(json.loads(path.read_text()))


def _of_bench(rows: Sequence[table.Row]) -> Iterator[str]:
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        here = [row for row in rows if row["temperature"] == temperature]
        tasks = list(dict.fromkeys(row["task"] for row in here))
        for task in tasks:
            yield table.overall([row for row in here if row["task"] == task])
        for metric, _ in table.COLUMNS.values():
            if metric in here[0]:
                yield table.by_task(here, metric)
        yield from (text for _, text in early_exit.tables(here, tasks))
    overall = [row for row in rows if row["task"] == OVERALL]
    yield koala.benchmarked(koala.named_heads(overall), overall)
    plain = {row["temperature"]: row["tokens_per_s"] for row in overall if row["method"] == AR}
    points = adaedl.points(overall)
    for drafter in dict.fromkeys(point.drafter for point in points):
        own = [point for point in points if point.drafter == drafter]
        yield from (adaedl.comparison(own, plain), adaedl.sweep(own))


def numbers(paths: Iterable[Path]) -> list[float]:
    """All numbers in files of JSON, or of JSON lines."""
    texts = [(path, path.read_text()) for path in paths]
    parts = [part for path, text in texts for part in (text.splitlines() if path.suffix == ".jsonl" else [text])]
    return [number for part in parts for number in _leaves(json.loads(part))]


def _leaves(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _leaves(one)
    elif isinstance(value, int | float):
        yield float(value)


def _among(figure: str, known: Iterable[float]) -> bool:
    places = len(figure.partition(".")[2])
    return any(format(abs(number) * scale, f".{places}f") == figure for number in known for scale in SCALES)


def main() -> None:
    named = [Path(name) for name in sys.argv[1:]] or [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    lines = [
        f"{page}:{found.line}: {problem}"
        for page in named
        for found in tables(page.read_text("utf-8"))
        for problem in problems(found, ROOT)
    ]
    if lines:
        raise SystemExit("\n".join(lines))


if __name__ == "__main__":
    run_script(main)
