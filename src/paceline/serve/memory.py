"""Memory that was freed, given back to the system."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

PAUSE = 30.0  # seconds from one time to the next: each takes some milliseconds


def _malloc_trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    except (OSError, TypeError):
        return None
    return found


class Trimmer:
    """Gives back what malloc keeps: passes of many shapes leave gaps in its arenas, which add up over hours."""

    def __init__(self) -> None:
        self._trim, self._last = _malloc_trim(), time.monotonic()
        self._due = False  # whether anything has been freed since

    def tidy(self, worked: bool) -> float | None:
        """Do it, unless it has been done lately, or nothing has been done since.

        Returns:
            Seconds after which to ask again, if nothing happens before; None: there is nothing to do.
        """
        self._due |= worked
        if not (self._trim and self._due):
            return None
        if (left := self._last + PAUSE - time.monotonic()) > 0:
            return left
        self._trim(0)
        self._last, self._due = time.monotonic(), False
        return None
