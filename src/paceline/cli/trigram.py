"""`paceline trigram build`: the n-gram matrix that the drafter trigram reads."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from paceline.cli.console import print_json
from paceline.cli.options import Corpus, TokenizerOf, given_path
from paceline.errors import OptionError

app = typer.Typer(help="Make the n-gram matrix of the drafter trigram.", no_args_is_help=False)


DIGITS = 18  # of a threshold: no corpus has an n-gram more often


@app.callback()
def trigram() -> None: ...


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
            help="Folder of the matrix; default in the cache, where trigram finds it.",
        ),
    ] = None,
    order: Annotated[int, Option("--order", help="n of the n-grams: 2, 3 or 4.")] = 3,
    threshold: Annotated[str, Option("--threshold", help="Rarer n-grams are dropped; auto: by corpus size.")] = "auto",
    weight: Annotated[
        int, Option("--weight", help="How often a token counts that the model wrote itself, in a folder of train data.")
    ] = 16,
    memory: Annotated[int, Option("--memory", help="MB to work in; the corpus may be larger.")] = 256,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Count the n-grams of a corpus in the model's tokens."""
    if threshold != "auto" and not (threshold.isdecimal() and len(threshold) <= DIGITS):
        told = f"auto or a whole number of {DIGITS} digits or fewer, not '{threshold[:30]}'"
        raise OptionError(f"--threshold must be {told}")
    from paceline.drafters.trigram.build import build_for

    least = None if threshold == "auto" else int(threshold)
    built, folder = build_for(model, corpus, out, order=order, threshold=least, weight=weight, memory=memory)
    if as_json:
        print_json(asdict(built))
        return
    stored = ", ".join(f"{count:,} {n}-grams" for n, count in built.ngrams.items())
    print(f"{built.tokens:,} tokens in {built.seconds:.0f} s: {stored} seen {built.threshold} times or more")
    print(f"{built.bytes:,} bytes")
    print(f"stored in {folder}", file=sys.stderr)
