"""The results as tables in a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.bench.methods import AR, is_baseline
from paceline.bench.report import REPORT
from paceline.bench.speed_bench import NAME as SPEED_BENCH
from paceline.bench.suites import OVERALL

if TYPE_CHECKING:
    from paceline.bench.metrics import ResultRow
    from paceline.bench.runner import Summary

METHOD, UNBOUNDED = 19, 10_000  # columns: methods are folded to these at least
BREAK, BROKEN = "\n", "\n/"  # in heads of columns


def print_summary(summary: Summary, console: Console | None = None, verbose: bool = False) -> None:
    """A table per temperature, with `verbose` one per task as well; then what needs attention."""
    console = console or Console()
    for temperature in dict.fromkeys(row["temperature"] for row in summary.rows):
        for task in dict.fromkeys(row["task"] for row in summary.rows) if verbose else (OVERALL,):
            rows = [row for row in summary.rows if row["temperature"] == temperature and row["task"] == task]
            _print_table(rows, console)
        if summary.config["settings"]["suite"].partition(":")[0] == SPEED_BENCH:
            console.print(_lengths([row for row in summary.rows if row["temperature"] == temperature]))
    for line in _remarks(summary):
        console.print(line, highlight=False)
    console.print(f"results: {escape(str(summary.out))}; as a page: {REPORT}", highlight=False)


def _print_table(rows: list[ResultRow], console: Console) -> None:
    """The table; where it is too wide, which would cut numbers off, a line for each of them."""
    table, folded = _table(rows), _table([row | {"method": row["method"][:METHOD]} for row in rows])
    if folded.__rich_measure__(console, console.options.update(max_width=UNBOUNDED)).minimum <= console.width:
        console.print(table)
        return
    console.print(table.title, highlight=False)
    for row in rows:
        console.print(escape(row["method"]), style="red" if row["wrong"] else None, highlight=False)
        for name, show in COLUMNS.items():
            if (value := show(row)) is not None:
                console.print(f"  {name.replace(BROKEN, '/').replace(BREAK, ' ')} {value}", highlight=False)


def _table(rows: list[ResultRow]) -> Table:
    first = rows[0]
    kind = "greedy" if first["temperature"] == 0 else f"temperature {first['temperature']:g}"
    batch = f", batch {first['batch']}" if first["batch"] > 1 else ""
    title = f"{escape(first['task'])}: {first['prompts']} prompts, {kind}{batch}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("method", overflow="fold", min_width=min(METHOD, max(len(row["method"]) for row in rows)))
    used = [(name, show) for name, show in COLUMNS.items() if any(show(row) is not None for row in rows)]
    for name, _ in used:
        table.add_column(name, justify="right")
    for row in rows:
        style = "red" if row["wrong"] else None
        table.add_row(escape(row["method"]), *((show(row) or "-") for _, show in used), style=style)
    return table


def _lengths(rows: list[ResultRow]) -> Table:
    """Acceptance lengths by category, as SPEED-Bench has them."""
    title = "acceptance length: tokens a pass, mean over prompts"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("category")
    for method in (by_method := {row["method"]: row for row in rows}):
        table.add_column(escape(method), justify="right", overflow="fold")
    known = {(row["task"], row["method"]): _number("acceptance_length", ".2f")(row) for row in rows}
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    for task in [*(task for task in tasks if task != OVERALL), OVERALL]:
        table.add_row(escape(task), *(known[task, method] or "-" for method in by_method))
    return table


def _number(key: str, form: str) -> Callable[[ResultRow], str | None]:
    def show(row: ResultRow) -> str | None:
        value = row[key]  # type: ignore[literal-required]  # one of COLUMNS below
        return None if value is None else format(value, form)

    return show


def _split(row: ResultRow) -> str | None:
    if row["split"] is None:
        return None
    return "/".join(f"{100 * seconds / row['seconds']:.0f}" for seconds in row["split"].values())


def _verdicts(row: ResultRow) -> str | None:
    if row["identical"] is None or row["tie"] is None:
        return None if row["identical"] is None else str(row["identical"])
    return f"{row['identical']}/{row['tie']}/{row['wrong']}"


#: In the order of the table; "dec" is decoding alone, the split is in %.
COLUMNS: dict[str, Callable[[ResultRow], str | None]] = {
    "tok/s": _number("tokens_per_s", ".1f"),
    "x ar": _number("speedup_ar", ".2f"),
    "x hf": _number("speedup_hf", ".2f"),
    "dec\nx ar": _number("decode_speedup_ar", ".2f"),
    "ttft": _number("ttft_s", ".2f"),
    "tau": _number("tau", ".2f"),
    "v_d": _number("v_d", ".2f"),
    "r_d": _number("r_d", ".2f"),
    "same/tie\n/WRONG": _verdicts,
    "draft/ver\n/sam/other": _split,
}


def _remarks(summary: Summary) -> list[str]:
    lines = []
    for row in (row for row in summary.rows if row["task"] == OVERALL):
        name, at = escape(row["method"]), f"at temperature {row['temperature']:g}"
        if row["wrong"]:
            count = f"{row['wrong']} of {row['prompts']} outputs {at}"
            lines.append(f"[bold red]WRONG[/]: {name}: {count} differ by more than noise: see differences.jsonl")
        slower = row["speedup_ar"] is not None and row["speedup_ar"] < 1
        if slower and row["method"] != AR and not is_baseline(row["method"]):
            lines.append(f"[yellow]slower than plain decoding[/]: {name} {at}: {row['speedup_ar']:.2f}x")
    return lines
