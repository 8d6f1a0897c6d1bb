"""A virtual environment a peer, made when it is first wanted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peers import Peer


class Unusable(Exception):
    """A peer cannot be had here; the message is one line for its row."""


def interpreter(peer: Peer, work: Path, python: str = sys.executable) -> Path:
    """The Python that has the peer's packages, installed now or before.

    Args:
        work: the folder of environments; one that was not completed is made anew.
        python: what makes the environment.

    Raises:
        Unusable: with pip's own reason.
    """
    if not peer.packages:
        return Path(sys.executable)
    found = _version(python)
    if found < peer.python:
        wanted, here = (".".join(map(str, version)) for version in (peer.python, found))
        raise Unusable(f"needs Python {wanted}, this is {here}: name another by --interpreter {peer.name}=PATH")
    folder = work / peer.name
    made = inside(folder)
    stamp, wanted = folder / "complete", "\n".join(peer.packages)
    if not stamp.exists() or stamp.read_text() != wanted:
        _run([python, "-m", "venv", "--clear", str(folder)])
        _run([str(made), "-m", "pip", "install", "--quiet", *peer.packages])
        if peer.unwanted:
            _run([str(made), "-m", "pip", "uninstall", "--quiet", "--yes", *peer.unwanted])
        stamp.write_text(wanted)
    return made


def preloaded(peer: Peer, python: Path) -> dict[str, str]:
    """The variables of the peer's process: its preloaded library, where this environment has it."""
    library = python.parents[1] / peer.preload
    return {"LD_PRELOAD": str(library)} if peer.preload and library.exists() else {}


def inside(folder: Path) -> Path:
    """The interpreter of a virtual environment."""
    return folder / ("Scripts" if os.name == "nt" else "bin") / "python"


def _version(python: str) -> tuple[int, int]:
    try:
        told = _run([python, "-c", "import sys; print(*sys.version_info[:2])"])
    except OSError as error:
        raise Unusable(f"{python}: {error.strerror}") from error
    major, minor = map(int, told.split())
    return major, minor


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        said = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "no reason given")
        raise Unusable(f"{Path(command[0]).name} {' '.join(command[1:4])}: {said}")
    return done.stdout
