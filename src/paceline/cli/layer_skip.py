"""`paceline layer-skip search`: which sublayers a draft may skip, found for a model and stored for it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from typer import Option

from paceline.cli.console import print_json
from paceline.cli.options import MethodOptions, ModelOptions, grouped, new_file
from paceline.errors import require

if TYPE_CHECKING:
    from paceline.drafters.layer_skip.skip_set import SkipSet
    from paceline.training.layer_skip import search as skip_search

app = typer.Typer(help="Choose the layers that the drafter layer-skip leaves out.", no_args_is_help=False)


@app.callback()
def layer_skip() -> None: ...


@app.command()
@grouped
def search(
    source: ModelOptions,
    suite: Annotated[str, Option("--suite", help="Prompts to judge by, a dozen of the kinds you use; as for bench.")],
    limit: Annotated[int | None, Option("--limit", min=1, help="First prompts of each task.")] = None,
    out: Annotated[
        Path | None,
        Option(
            "--out",
            "-o",
            parser=new_file,
            metavar="FILE",
            help="File of the result; default in the cache, where layer-skip finds it.",
        ),
    ] = None,
    trials: Annotated[int, Option("--trials", min=1, help="Skip sets to try.")] = 100,
    new_tokens: Annotated[int, Option("--new-tokens", min=1, help="Tokens of each prompt's continuation.")] = 32,
    k_max: Annotated[int, Option("--k-max", min=1, help="Longest draft considered.")] = 8,
    seed: Annotated[int, Option("--seed", min=0, max=2**32 - 1, help="Makes the search repeatable.")] = 0,
    resume: Annotated[bool, Option("--resume", help="Go on with a search that was stopped.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Search the sublayers to skip by Bayesian optimisation (Draft & Verify), for the most tokens a second."""
    from paceline.bench.suites import load_suite
    from paceline.drafters.layer_skip.skip_set import stored_path
    from paceline.training.layer_skip import search as skip_search

    prompts = load_suite(suite, limit=limit)
    if out:
        _check_journal(out, resume)
    llm = source.llm(MethodOptions(drafter="none"))
    target = out or stored_path(llm.target)
    _check_journal(target, resume)
    with _bar() as bar:
        task = bar.add_task("searching", total=trials)

        def progress(made: skip_search.SearchProgress) -> None:
            bar.update(task, completed=made.done, description=f"best so far {made.best:.2f}x, last {made.speedup:.2f}x")

        found = skip_search.search(
            llm.target,
            [llm.encode(prompt.turns[0]) for prompt in prompts],
            trials=trials,
            new_tokens=new_tokens,
            k_max=k_max,
            seed=seed,
            journal=_journal(target),
            resume=resume,
            progress=progress,
        )
    found = replace(found, found=found.found | {"suite": suite})
    found.save(target)
    if as_json:
        print_json({"out": str(target), "attention": found.attention, "mlp": found.mlp, "found": found.found})
    else:
        _print(found)
    print(f"stored in {target}", file=sys.stderr)


def _journal(out: Path) -> Path:
    return out.with_name(out.name + ".journal")


def _check_journal(out: Path, resume: bool) -> None:
    require(not resume or _journal(out).exists(), f"there is no {_journal(out)} to go on from: leave out --resume")


def _print(found: SkipSet) -> None:
    facts = found.found
    print(f"skipped attention: {', '.join(map(str, found.attention)) or 'none'}")
    print(f"skipped MLP: {', '.join(map(str, found.mlp)) or 'none'}")
    print(f"acceptance {facts['acceptance']}, a drafted token costs {facts['draft_cost']} of a decoding step")
    print(f"predicted: {facts['speedup']} times plain decoding with k = {facts['k']} (tau {facts['tau']})")
    if not found.sublayers or float(str(facts["speedup"])) < 1:
        print("no set of sublayers pays on this machine: skip none, or use another drafter")


def _bar() -> Progress:
    """On a terminal only: an error stands alone elsewhere."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
