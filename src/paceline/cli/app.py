"""The `paceline` program: its commands, and how their errors are told."""

from __future__ import annotations

import io
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import (
    bench,
    chat,
    export,
    generate,
    layer_skip,
    methods,
    profile,
    replay,
    report,
    rest,
    serve,
    trigram,
    tune,
)
from paceline.cli.console import NOTES, tell_notes
from paceline.cli.train import app as train
from paceline.errors import PacelineError
from paceline.version import __version__

# Command modules import torch and transformers inside their functions only: `--help` and typing errors are instant.
app = typer.Typer(
    help="Faster decoding of Hugging Face causal language models, without changing their output.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("profile")(profile.profile)
app.command("bench")(bench.bench)
app.command("report")(report.report)
app.command("replay")(replay.replay)
app.command("tune")(tune.tune)
app.add_typer(layer_skip.app, name="layer-skip")
app.add_typer(trigram.app, name="trigram")
app.add_typer(rest.app, name="rest")
app.add_typer(train.app, name="train")
app.add_typer(export.app, name="export")
app.command("drafters")(methods.drafters)
app.command("policies")(methods.policies)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001  # its callback answers
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[  # noqa: ARG001  # `main` looks for it
        bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """See `paceline.cli.main`, which calls it."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    debug = "--debug" in words[:end]
    words = [word for word in words[:end] if word != "--debug"] + words[end:]
    _open_streams()
    NOTES.clear()
    _quiet(debug)
    try:
        code = app(words, prog_name="paceline", standalone_mode=False)
        tell_notes()
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:  # whoever read our output has gone: nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (PacelineError, typer.TyperException, OSError) as error:
        if debug:
            traceback.print_exc()
        print(f"error: {_line(error)}", file=sys.stderr)
        return getattr(error, "exit_code", 1)


def _line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = error.format_message() if isinstance(error, typer.TyperException) else str(error)
    context = getattr(error, "ctx", None)
    hint = f" (see {context.command_path} --help)" if context else ""
    return " ".join(text.split()).replace(": Value error, ", ": ") + hint  # typer's own word for what a value is not


def _open_streams() -> None:
    """Standard streams that whoever started us has closed lead nowhere, instead of being None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  (open to the end)


def _quiet(debug: bool) -> None:
    """Keep the libraries' chatter off the terminal, and never fail for a character it cannot show."""
    if not debug and not sys.warnoptions:
        warnings.simplefilter("ignore")
    for library in ("TRANSFORMERS", "HF_HUB"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
