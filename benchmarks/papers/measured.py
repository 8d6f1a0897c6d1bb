"""What the programs of this folder share: their options, and a run of `paceline bench` with a program's own methods.

Whoever imports this finds the programs of the folder above as well.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from table import Row, about, markdown

from paceline.bench.config import BenchConfig
from paceline.bench.runner import run
from paceline.errors import PacelineError

TUNING = Path(__file__).parents[1] / "prompts" / "tuning.jsonl"


def options(doc: str | None, *, temperature: float = 0.0) -> argparse.ArgumentParser:
    """Those of `paceline bench` that all programs here take; `doc` is a program's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tier", default="auto")
    parser.add_argument("--suite", default=str(TUNING), help="as for paceline bench; default the tuning prompts")
    parser.add_argument("--tasks", default="", help="only these, separated by commas")
    parser.add_argument("--limit", type=int, help="first prompts of each task")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=temperature)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results; a run that was stopped goes on")
    return parser


def measured(args: argparse.Namespace, methods: Sequence[str]) -> list[Row]:
    """The rows of `results.jsonl`, measured now or by an earlier call into the same folder; says what ran where."""
    try:
        config = BenchConfig(
            model=args.model,
            suite=args.suite,
            out=args.out,
            methods=methods,
            tasks=args.tasks,
            limit=args.limit,
            max_new_tokens=args.max_new_tokens,
            temperatures=(args.temperature,),
            tier=args.tier,
        )
        summary = run(config)
    except PacelineError as error:
        raise SystemExit(f"error: {error}") from error
    rows: list[Row] = [dict(row) for row in summary.rows]
    print(f"{about(summary.config)} Temperature {args.temperature:g}, {rows[0]['prompts']} prompts.")
    return rows


def grid(head: str, cells: Mapping[tuple[str, str], str]) -> str:
    """A Markdown table of cells by row and column, in the order of their first appearance."""
    rows, columns = (list(dict.fromkeys(key[axis] for key in cells)) for axis in (0, 1))
    return markdown([[head, *columns], *([row, *(cells.get((row, name), "") for name in columns)] for row in rows)])
