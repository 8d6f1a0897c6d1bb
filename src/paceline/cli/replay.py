"""`paceline replay`: what methods would give on the texts of a trace, on this machine or another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer import Option

from paceline.cli.console import print_json
from paceline.cli.options import given_path
from paceline.errors import OptionError, require

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.profiling.project import Terms
    from paceline.profiling.trace import Measured, Trace

METHOD, COLUMN = 19, 8  # characters that a table needs for methods, and for each other column


def replay(
    trace: Annotated[Path, typer.Argument(parser=given_path, help="trace.jsonl.gz of paceline bench --trace.")],
    profile: Annotated[
        list[str] | None,
        Option("--profile", metavar="NAME|FILE", help="Costs of another machine; may be given again."),
    ] = None,
    methods: Annotated[
        str, Option("--methods", help="Comma-separated; default those measured. Any policy goes with a traced drafter.")
    ] = "",
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Play a trace again under known costs: no model runs, and no clock is looked at.

    Speedups are of decoding, prompts aside, over plain decoding.

    Those of another machine are projections: passes take what its profile says, and as much is accepted as here.
    """
    from paceline.profiling.project import project, terms_of
    from paceline.profiling.shipped import load_profile
    from paceline.profiling.trace import PLAIN, read_trace

    found = read_trace(trace)
    terms = [terms_of("here", found.header.profile, found)]
    columns = ["here", "method", "measured", *(Path(name).stem for name in profile or ())]
    require(len(set(columns)) == len(columns), f"profiles need names of their own: {', '.join(columns[3:])}")
    terms += [terms_of(Path(name).stem, load_profile(name), found) for name in profile or ()]
    names = [name.strip() for name in methods.split(",") if name.strip()] or list(_replayable(found, terms[0]))
    rows: list[dict[str, Any]] = [{"method": name, "measured": _measured(found, name)} for name in names]
    for under in terms:
        plain = project(found, PLAIN, under)
        for row in rows:
            own = project(found, row["method"], under)
            row[under.name] = {"speedup": speedup(own, plain), "tau": _tau(own)}
    if as_json:
        print_json({"trace": str(trace), "rows": rows})
    else:
        _print(rows, [under.name for under in terms])


def _replayable(trace: Trace, terms: Terms) -> Iterator[str]:
    """The methods that were measured, but for those that a replay cannot have: it says which."""
    from paceline.profiling.project import check_method

    for name in trace.header.measured:
        try:
            check_method(trace, name, terms)
        except OptionError as error:
            print(f"without {name}: {error}", file=sys.stderr)
        else:
            yield name


def speedup(own: dict[str, Measured], plain: dict[str, Measured]) -> float:
    """Seconds a token of plain decoding by those of a method, all tasks pooled."""
    return _seconds_a_token(plain) / _seconds_a_token(own)


def _seconds_a_token(sums: dict[str, Measured]) -> float:
    return sum(one.seconds for one in sums.values()) / sum(one.tokens for one in sums.values())


def _tau(sums: dict[str, Measured]) -> float:
    return sum(one.tokens for one in sums.values()) / sum(one.rounds for one in sums.values())


def _measured(trace: Trace, method: str) -> float | None:
    known = trace.header.measured
    return speedup(known[method], known["ar"]) if method in known else None


def _print(rows: list[dict[str, Any]], profiles: list[str]) -> None:
    heads = ["measured", "predicted", "off by", "tau", *profiles[1:]]
    lines = {row["method"]: _cells(row, profiles[1:]) for row in rows}
    console = Console(highlight=False)
    if console.width < METHOD + COLUMN * len(heads):
        for method, cells in lines.items():
            print(method, *(f"  {head} {cell}" for head, cell in zip(heads, cells, strict=True)), sep="\n")
    else:
        console.print(_table(heads, lines))
    if len(profiles) > 1:
        print("Columns of other profiles are projections.")


def _cells(row: dict[str, Any], profiles: list[str]) -> list[str]:
    measured, here = row["measured"], row["here"]
    return [
        "-" if measured is None else f"{measured:.2f}",
        f"{here['speedup']:.2f}",
        "-" if measured is None else f"{here['speedup'] / measured - 1:+.1%}",
        f"{here['tau']:.2f}",
        *(f"{row[name]['speedup']:.2f}" for name in profiles),
    ]


def _table(heads: list[str], lines: dict[str, list[str]]) -> Table:
    table = Table(
        title="decode speedup over plain decoding",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("method", overflow="fold", min_width=METHOD)
    for head in heads:
        table.add_column(escape(head), justify="right", overflow="fold")
    for method, cells in lines.items():
        table.add_row(escape(method), *cells)
    return table
