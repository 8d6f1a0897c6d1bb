"""`paceline export`: what was trained here, in the form that other programs read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Option

from paceline.cli.console import print_json
from paceline.cli.options import given_path, new_file
from paceline.files import at_home, require_new_folder

if TYPE_CHECKING:
    from paceline.targets import Target

app = typer.Typer(help="Write what was trained here for other programs.", no_args_is_help=False)


@app.callback()
def export() -> None: ...


DEFAULT = "smollm2-135m"
Model = Annotated[str, Option("--model", "-m", help="The target: named model, hub id, folder or GGUF file.")]
Json = Annotated[bool, Option("--json", help="Print one JSON object.")]
Out = Annotated[Path, Option("--out", "-o", parser=given_path, metavar="FOLDER", help="New folder.")]
Head = Annotated[
    str, Option("--head", help="Its folder, of ours or in a public layout; auto: the one the drafter takes.")
]
Layers = Annotated[int | None, Option("-k", help="Layers that the head must have.")]
Format = Annotated[
    Literal["vllm", "original"], Option("--format", help="For vLLM, or for the program that the method came with.")
]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None, Option("--dtype", help="Of the weights. Default: the target's.")
]


@app.command("draft-model")
def draft_model(
    out: Annotated[
        Path, Option("--out", "-o", parser=given_path, metavar="FOLDER", help="New folder of the draft model.")
    ],
    model: Model = DEFAULT,
    head: Annotated[str, Option("--head", help="Folder of its exit head; auto: the one early-exit takes.")] = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        Option("--dtype", help="Of the weights; below float32 its drafts may differ from early-exit's."),
    ] = "float32",
    as_json: Json = False,
) -> None:
    """The first layers and the exit head of early-exit as a plain Hugging Face model of the same tokenizer."""
    from paceline.drafters.early_exit.export import export_draft_model
    from paceline.drafters.early_exit.head import ExitHead
    from paceline.targets import as_target
    from paceline.targets.sources import load_model

    require_new_folder(out)  # before what takes long
    loaded, tokenizer = load_model(model, dtype=dtype)
    folder = ExitHead.find(as_target(loaded)) if head == "auto" else at_home(head)
    made = ExitHead.load(folder)
    draft = export_draft_model(loaded, tokenizer, made, out)
    counts = {"layers": draft.config.num_hidden_layers, "parameters": draft.num_parameters()}
    if as_json:
        print_json({"out": str(out), "head": str(folder), **counts})
    else:
        print(f"{counts['layers']} layers, {counts['parameters']:,} parameters; use it as draft-model:model={out}")
    print(f"stored in {out}", file=sys.stderr)


@app.command("medusa")
def medusa(
    out: Out,
    model: Model = DEFAULT,
    head: Head = "auto",
    k: Layers = None,
    layout: Format = "vllm",
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Medusa heads in vLLM's layout, or in that of FasterDecoding/Medusa."""
    from paceline.drafters.medusa.formats import read_medusa, write_medusa
    from paceline.drafters.medusa.head import MedusaHead

    require_new_folder(out)
    target = _target(model)
    made, folder = MedusaHead.take(head, target, read_medusa, layers=k)
    assert folder is not None
    write_medusa(made, target, out, layout, _dtype(dtype))
    _report(out, folder, {"heads": made.config.heads, "layers": made.config.layers}, as_json)


@app.command("eagle")
def eagle(
    out: Out,
    model: Model = DEFAULT,
    head: Head = "auto",
    k: Layers = None,
    layout: Format = "vllm",
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """An EAGLE head in vLLM's layout (of EAGLE-3 the speculators format), or in that of SafeAILab/EAGLE."""
    from paceline.drafters.eagle.eagle3_formats import write_eagle3
    from paceline.drafters.eagle.eagle3_head import Eagle3Head
    from paceline.drafters.eagle.formats import write_eagle
    from paceline.drafters.eagle.kinds import take_eagle

    require_new_folder(out)
    target = _target(model)
    made, folder = take_eagle(head, target, layers=k)
    assert folder is not None
    if isinstance(made, Eagle3Head):
        write_eagle3(made, target, out, layout, _dtype(dtype))
    else:
        write_eagle(made, target, out, layout, _dtype(dtype))
    _report(out, folder, {"layers": made.config.layers}, as_json)


@app.command("dflash")
def dflash(
    out: Out,
    model: Model = DEFAULT,
    head: Head = "auto",
    layout: Format = "vllm",
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """A DFlash head in the speculators format, which vLLM reads, or in that of z-lab/dflash."""
    from paceline.drafters.dflash.formats import read_dflash, write_dflash
    from paceline.drafters.dflash.head import DFlashHead

    require_new_folder(out)
    target = _target(model)
    made, folder = DFlashHead.take(head, target, read_dflash)
    assert folder is not None
    write_dflash(made, target, out, layout, _dtype(dtype))
    _report(out, folder, {"layers": made.config.layers, "block": made.config.block}, as_json)


@app.command("llama-cpp-lookup")
def llama_cpp_lookup(
    out: Annotated[Path, Option("--out", "-o", parser=new_file, metavar="FILE", help="New file.")],
    model: Model = DEFAULT,
    matrix: Annotated[
        str, Option("--matrix", help="Folder of 'paceline trigram build'; auto: the one that trigram takes.")
    ] = "auto",
    as_json: Json = False,
) -> None:
    """The trigrams of a corpus as llama.cpp's static lookup cache, for its drafter ngram-cache."""
    from paceline.drafters.trigram.drafter import find_matrix
    from paceline.drafters.trigram.lookup_cache import write_lookup_cache
    from paceline.errors import OptionError

    found = find_matrix(_target(model), matrix)
    if found is None:
        raise OptionError(f"there is no n-gram matrix for {model}: make one with 'paceline trigram build'")
    written = write_lookup_cache(found, out)
    if as_json:
        print_json({"out": str(out), **written._asdict()})
    else:
        print(f"{written.trigrams:,} trigrams, of {written.pairs:,} pairs of tokens")
    print(f"stored in {out}", file=sys.stderr)


def _target(model: str) -> Target:
    from paceline.targets import as_target
    from paceline.targets.sources import load_as_stored

    return as_target(*load_as_stored(model))


def _dtype(name: str | None) -> Any:
    import torch

    return getattr(torch, name) if name else None


def _report(out: Path, head: Path, counts: dict[str, int], as_json: bool) -> None:
    if as_json:
        print_json({"out": str(out), "head": str(head), **counts})
    else:
        print(", ".join(f"{name}: {count}" for name, count in counts.items()))
    print(f"stored in {out}", file=sys.stderr)
