"""`paceline export`: what was trained here, in the form that other programs read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from paceline.cli.console import print_json

app = typer.Typer(help="Write what was trained here for other programs.", no_args_is_help=False)


@app.callback()
def export() -> None: ...


@app.command("draft-model")
def draft_model(
    out: Annotated[Path, Option("--out", "-o", help="New folder of the draft model.")],
    model: Annotated[str, Option("--model", "-m", help="The target: named model, hub id, folder or GGUF file.")] = (
        "smollm2-135m"
    ),
    head: Annotated[str, Option("--head", help="Folder of its exit head; auto: the one early-exit takes.")] = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        Option("--dtype", help="Of the weights; below float32 its drafts may differ from early-exit's."),
    ] = "float32",
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """The first layers and the exit head of early-exit as a plain Hugging Face model of the same tokenizer."""
    from paceline.drafters.early_exit.export import export_draft_model
    from paceline.drafters.early_exit.head import ExitHead
    from paceline.targets import as_target
    from paceline.targets.sources import load_model

    loaded, tokenizer = load_model(model, dtype=dtype)
    folder = ExitHead.find(as_target(loaded)) if head == "auto" else Path(head)
    made = ExitHead.load(folder)
    draft = export_draft_model(loaded, tokenizer, made, out)
    counts = {"layers": draft.config.num_hidden_layers, "parameters": draft.num_parameters()}
    if as_json:
        print_json({"out": str(out), "head": str(folder), **counts})
    else:
        print(f"{counts['layers']} layers, {counts['parameters']:,} parameters; use it as draft-model:model={out}")
    print(f"stored in {out}", file=sys.stderr)
