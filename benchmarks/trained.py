"""Heads that a benchmark trains, each once, in a folder of its own; imported by the programs here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COMMAND = "command.json"  # beside a head: how it was trained, so that no other is taken for it


def train(kind: str, folder: Path, words: Sequence[str]) -> None:
    """`paceline train KIND` into `folder`, taking up one that was stopped; nothing if it is done."""
    note, told = folder / COMMAND, [kind, *words]
    if note.exists() and json.loads(note.read_text()) != told:
        sys.exit(f"{folder} holds a head that was trained by another command: see {note}, or choose another --out")
    trained = facts(kind, folder)
    if trained and trained["ended"]:
        return
    folder.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(told))
    print(f"\n{folder.name}:", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "paceline", "train", kind, "--resume", "--out", str(folder)]
    if subprocess.call([*command, *words]):
        sys.exit(f"{folder.name} could not be trained")


def own_and_passed() -> tuple[list[str], list[str]]:
    """The words of the command line for the program itself, and those after `--`."""
    own = sys.argv[1:]
    at = own.index("--") if "--" in own else len(own)
    return own[:at], own[at + 1 :]


def facts(kind: str, folder: Path) -> dict[str, Any] | None:
    """How the head there was trained, so far; None: there is none."""
    path = folder / f"{kind}.json"
    return json.loads(path.read_text())["trained"] if path.exists() else None
