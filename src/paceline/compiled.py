"""Functions that numba compiles, kept on the disk until any source that they might be made of changes.

numba itself keeps machine code until the function's own file changes, though the code of all that it calls is in it.
Here the name under which it is kept tells the sources of the whole folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any]) -> Any:
    """The decorator: compiled for the types of its arguments, and run without Python's lock."""
    return keep(njit(nogil=True), njit(nogil=True, cache=True), function)


def keep(compiler: Callable[..., Any], keeping: Callable[..., Any], function: Callable[..., Any]) -> Any:
    """What `keeping` makes of a function, or else `compiler`: there may be no place to write to, neither beside the
    sources nor in the home folder."""
    function.__qualname__ += "_" + _sources(Path(function.__code__.co_filename).parent)
    try:
        return keeping(function)
    except RuntimeError:
        return compiler(function)


@cache
def _sources(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
