"""`paceline rest build`: the datastore that the drafter rest looks things up in."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from paceline.cli.console import print_json
from paceline.cli.options import Corpus, TokenizerOf, given_path

app = typer.Typer(help="Make the datastore of the drafter rest.", no_args_is_help=False)


@app.callback()
def rest() -> None: ...


@app.command()
def build(
    corpus: Corpus,
    model: TokenizerOf = "smollm2-135m",
    out: Annotated[
        Path | None,
        Option(
            "--out",
            "-o",
            parser=given_path,
            metavar="FOLDER",
            help="Folder of the datastore; default in the cache, where rest finds it.",
        ),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Sort all suffixes of a corpus in the model's tokens."""
    from paceline.drafters.rest.datastore import build_for

    built, folder = build_for(model, corpus, out)
    if as_json:
        print_json(asdict(built))
        return
    print(f"{built.tokens:,} tokens in {built.seconds:.0f} s: {built.bytes:,} bytes")
    print(f"stored in {folder}", file=sys.stderr)
