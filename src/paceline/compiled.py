"""Functions that numba compiles, kept on the disk until any source that they might be made of changes.

numba itself keeps machine code until the function's own file changes, though the code of all that it calls is in it.
Here the name under which it is kept tells the sources of the whole folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit

int64 = cast("type[int]", np.int64)  # of one type in compiled code, where a literal has its own; type checkers want int
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """The decorator: compiled for the types of its arguments, and run without Python's lock."""
    return cast("Function", keep(partial(njit, nogil=True), function))


def keep(decorator: Callable[..., Any], function: Callable[..., Any]) -> Any:
    """A function under one of numba's decorators, kept where there is a place to write to: beside the sources, or else
    in the home folder.
    """
    function.__qualname__ += "_" + _sources(Path(function.__code__.co_filename).parent)
    try:
        return decorator(cache=True)(function)
    except RuntimeError:
        return decorator()(function)


@cache
def _sources(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
