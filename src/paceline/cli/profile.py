"""`paceline profile`: what a target pass and a draft step cost here, and how far that is from what could be."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer import Option

from paceline.cli.console import print_json
from paceline.cli.options import ModelChoice, grouped, new_file
from paceline.drafters import DRAFTERS

if TYPE_CHECKING:
    from paceline.profiling import Profile


@grouped
def profile(
    source: ModelChoice,
    tier: Annotated[
        list[str] | None,
        Option(
            "--tier",
            "--tiers",
            help="auto (default), native, torch, reference; several with commas or given again.",
        ),
    ] = None,
    drafter: Annotated[
        list[str] | None, Option("--drafter", "-d", help="Measure this drafter too; may be given again.")
    ] = None,
    context: Annotated[int, Option("--context", min=1, help="Tokens in front of every pass.")] = 256,
    repeats: Annotated[int, Option("--repeats", min=1, help="Measurements of each number.")] = 15,
    plot: Annotated[
        Path | None,
        Option(
            "--plot", parser=new_file, metavar="FILE", help="Draw T(k) and the roofline into a PNG, SVG or PDF file."
        ),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure what the model's pass over k tokens costs, and what drafting a token does; the cache keeps the result."""
    chosen = {text: DRAFTERS.parse(text) for text in drafter or ()}
    tiers = dict.fromkeys(name.strip() for names in tier or () for name in names.split(","))

    from paceline.profiling import measure
    from paceline.profiling.plot import check_plot, draw
    from paceline.targets import check_tier

    if plot:
        check_plot(plot)
    for name in tiers:
        check_tier(name, source.exact)
    found = measure(
        [source.target(name) for name in tiers or ("auto",)],
        source.model,
        context=context,
        repeats=repeats,
        drafters={text: spec.build for text, spec in chosen.items()},
    )
    if as_json:
        print_json({"profiles": [one.as_dict() for one in found]})
    else:
        _print(Console(highlight=False), found)
    sys.stdout.flush()  # what was measured is told, whatever becomes of the files
    for one in found:
        print(f"stored in {one.save()}", file=sys.stderr)
    if plot:
        draw(found, plot)


def _print(console: Console, found: Sequence[Profile]) -> None:
    first = found[0]
    console.print(
        f"{escape(first.model)} on {first.device}, threads: {first.threads}, {first.context} tokens of context. "
        "Milliseconds: median, quartiles, the least that reading and computing could take by the roofline, and how "
        "much of it is reached."
    )
    for one in found:
        roof = one.roofline
        console.print(
            f"\n[bold]{one.tier} tier[/], {one.dtype}; roofline {roof.bandwidth / 1e9:.1f} GB/s, "
            f"{roof.flops / 1e9:.0f} GFLOPS\nexact: {_exact(one)}"
        )
        console.print(_table(one))
        for line in _drafts(one):
            console.print(line)


def _exact(one: Profile) -> str:
    if one.exact and one.noise:
        return f"[bold red]NO[/], though promised: logits differ by {one.noise:.1e} between widths"
    if one.exact:
        return f"yes ({one.exactness}); measured: the same bits at every width"
    return f"no ({one.exactness}); measured: logits differ by up to {one.noise:.1e} between widths"


def _table(one: Profile) -> Table:
    single = one.passes[1].median
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("", "median", "25 %", "75 %", "of T(1)", "MB", "GFLOP", "least", "reached"):
        table.add_column(title, justify="right" if title else "left")
    for width, cost in one.passes.items():
        table.add_row(
            f"T({width})",
            *(f"{1e3 * value:.2f}" for value in (cost.median, cost.low, cost.high)),
            f"{cost.median / single:.2f}",
            f"{(cost.weight_bytes + cost.cache_bytes) / 1e6:.1f}",
            f"{cost.flops / 1e9:.2f}",
            f"{1e3 * cost.floor:.2f}",
            f"{cost.floor / cost.median:.0%}",
        )
    return table


def _drafts(one: Profile) -> Iterator[str]:
    for name, draft in one.drafts.items():
        if draft is None:
            yield f"{escape(name)}: proposed nothing"
        else:
            median, *quartiles = (f"{1e3 * value:.2f}" for value in (draft.median, draft.low, draft.high))
            share = draft.median / one.passes[1].median
            yield f"{escape(name)}, a token: {median} ({' to '.join(quartiles)}), {share:.3f} of T(1)"
