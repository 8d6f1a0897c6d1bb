"""The engine's side of the field benchmark: a program that loads once and then answers a JSON line by a JSON line.

Adapters (`with_*.py`) call `serve`. They run in environments of their own, so this file needs only Python. Started
with one argument, `{"model": folder, "gguf": file, "threads": n, "eos": ids, "context": tokens, "modes": {name:
options}}`, an adapter prints `{"versions": {...}, "failed": {mode: why}}` when it has loaded, and then

    {"mode": m, "ids": [...], "max_new_tokens": n, "temperature": t, "seed": s}  ->  {"ids": [...], "seconds": x, ...}

`ids` of an answer are the new tokens alone; `passes`, where it is known, the target's passes, the prompt's included.
An error is a line, too: `{"error": why}`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple


class Asked(NamedTuple):
    """A request: continue `ids` by at most `max_new_tokens`, greedily at temperature 0."""

    ids: list[int]
    max_new_tokens: int
    temperature: float
    seed: int


class Told(NamedTuple):
    """New tokens, and the target's passes that made them, where they are counted."""

    ids: Sequence[int]
    passes: int | None = None


Generate = Callable[[Asked], Told]
Build = Callable[[str, dict[str, Any]], Generate]  # of a mode's name and options


def serve(load: Callable[[dict[str, Any]], Build], packages: Sequence[str]) -> None:
    """Load, tell, and answer until standard input ends.

    Args:
        load: makes what builds the modes, of the program's argument.
        packages: whose versions are told.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print is no answer

    def tell(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=out, flush=True)

    settings = json.loads(sys.argv[1])
    modes: dict[str, Generate] = {}
    failed: dict[str, str] = {}
    try:
        build = load(settings)
    except Exception as error:
        tell({"error": _said(error)})
        return
    for name, options in settings["modes"].items():
        try:
            modes[name] = build(name, options)
        except Exception as error:
            failed[name] = _said(error)
    tell({"versions": {name: found for name in packages if (found := _version(name))}, "failed": failed})
    for line in sys.stdin:
        tell(_answer(modes, json.loads(line)))


def _answer(modes: dict[str, Generate], question: dict[str, Any]) -> dict[str, Any]:
    generate = modes[question.pop("mode")]
    asked = Asked(**question)
    started = time.perf_counter()
    try:
        told = generate(asked)
    except Exception as error:
        return {"error": _said(error)}
    seconds = time.perf_counter() - started
    return {"ids": list(told.ids), "seconds": seconds, "passes": told.passes}


def _said(error: Exception) -> str:
    """One line; the whole story goes to standard error, which is the engine's log."""
    traceback.print_exception(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
