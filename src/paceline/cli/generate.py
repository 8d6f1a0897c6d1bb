"""`paceline generate`: one prompt, its text as it comes, and what it cost."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from typer import Argument, Option

from paceline.cli.compare import compare_runs, show_comparison
from paceline.cli.console import as_result, print_json, summary, write
from paceline.cli.options import MethodOptions, ModelOptions, Sampling, grouped, new_file
from paceline.cli.prompt import read_prompt
from paceline.errors import OptionError, check_text


@grouped
def generate(
    source: ModelOptions,
    method: MethodOptions,
    sampling: Sampling,
    prompt: Annotated[str | None, Argument(help="The prompt.")] = None,
    file: Annotated[str | None, Option("--file", "-f", help="Read the prompt from a UTF-8 file, - for stdin.")] = None,
    system: Annotated[str | None, Option("--system", help="System message of the chat template.")] = None,
    prediction: Annotated[
        str | None,
        Option("--prediction", metavar="FILE", help="What the output will largely be, in a UTF-8 file: drafted first."),
    ] = None,
    raw: Annotated[bool, Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    compare: Annotated[bool, Option("--compare", help="Side by side with plain decoding.")] = False,
    svg: Annotated[
        Path | None,
        Option("--svg", parser=new_file, metavar="FILE", help="Keep what --compare shows as a picture, in this file."),
    ] = None,
    colour: Annotated[bool, Option("--colour", help="Colour the tokens by who proposed them.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Continue a prompt."""
    text = read_prompt(prompt, file)
    if raw and system is not None:
        raise OptionError("--system needs the chat template, which --raw leaves out")
    if compare and prediction is not None:
        raise OptionError("--compare compares methods: it takes no --prediction")
    conversation: Any = text
    if system is not None:
        conversation = [
            {"role": "system", "content": check_text(system, "system message")},
            {"role": "user", "content": text},
        ]
    if svg and (as_json or not compare):
        raise OptionError("--svg keeps what --compare shows on a terminal: give --compare, and not --json")
    predicted = "" if prediction is None else read_prompt(None, prediction, "prediction")
    params = sampling.checked()
    llm = source.llm(method)
    ids = llm.encode(conversation, chat=False if raw else None)
    about = {"model": source.model, "method": method.label(llm), "tier": llm.target.tier}

    if compare:
        if as_json:
            print_json(about | compare_runs(llm, ids, params))
        else:
            show_comparison(Console(highlight=False), llm, ids, params, text, about["method"], svg)
        return
    [request] = llm.requests([ids], prediction=predicted, **params)
    if as_json:
        written = "".join(piece.text for _ in llm.run([request]) for piece in request.read())
        print_json(about | as_result(request, written))
    else:
        write(llm, request, colour)
        print(summary(request.stats), file=sys.stderr)
