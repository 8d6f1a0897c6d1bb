"""`paceline profile`: what a target pass and a draft step cost here."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table
from typer import Option

from paceline.cli.console import print_json
from paceline.cli.options import Source, grouped
from paceline.drafters import DRAFTERS

if TYPE_CHECKING:
    from paceline.profiling import Profile, Timing


@grouped
def profile(
    source: Source,
    drafter: Annotated[
        list[str] | None, Option("--drafter", "-d", help="Measure this drafter too; may be given again.")
    ] = None,
    context: Annotated[int, Option("--context", min=1, help="Tokens in front of every pass.")] = 256,
    repeats: Annotated[int, Option("--repeats", min=1, help="Measurements of each number.")] = 15,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure what the model's pass over k tokens costs, and what drafting a token does; the cache keeps the result."""
    from paceline.profiling import measure

    chosen = {text: DRAFTERS.parse(text) for text in drafter or ()}
    target = source.target()
    found = measure(
        target,
        source.model,
        context=context,
        repeats=repeats,
        drafters={text: spec.build for text, spec in chosen.items()},
    )
    path = found.save()
    if as_json:
        print_json(found.as_dict())
    else:
        _print(Console(highlight=False), found)
    print(f"stored in {path}", file=sys.stderr)


def _print(console: Console, found: Profile) -> None:
    console.print(
        f"{found.model}, {found.tier} tier, {found.dtype} on {found.device}, {found.threads} threads, "
        f"{found.context} tokens of context; milliseconds, median and quartiles\n"
    )
    single = found.passes[1].median
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("", "median", "25 %", "75 %", "of T(1)", "tokens/s"):
        table.add_column(title, justify="right" if title else "left")

    def row(name: str, timing: Timing, tokens: int) -> None:
        milliseconds = [f"{1000 * value:.2f}" for value in (timing.median, timing.low, timing.high)]
        table.add_row(name, *milliseconds, f"{timing.median / single:.2f}", f"{tokens / timing.median:.0f}")

    for width, timing in found.passes.items():
        row(f"T({width})", timing, width)
    for name, cost in found.drafts.items():
        if cost is None:
            table.add_row(f"{name}: proposed nothing")
        else:
            row(f"{name}, a token", cost, 1)
    console.print(table)
