"""Threads that share a target take turns."""

from __future__ import annotations

import threading


class Turns:
    """A lock, as a context: whoever waits for it comes before whoever has just had it, and a thread that has it may
    enter again.

    A target has buffers for one pass at a time, and its drafters for one round. With an ordinary lock a thread that
    decodes would have the next round as well, and the others nothing until it is done.
    """

    def __init__(self) -> None:
        self._taken, self._next = threading.RLock(), threading.RLock()
        self._owner: int | None = None
        self._entered = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner == me:
            self._taken.acquire()
        else:
            with self._next:  # held while waiting: whoever gives the lock back cannot take it before
                self._taken.acquire()
            self._owner = me
        self._entered += 1

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        if not self._entered:
            self._owner = None
        self._taken.release()

    def __getstate__(self) -> dict[str, object]:
        """Nothing: of a target that is kept in a file nobody has a turn."""
        return {}

    def __setstate__(self, state: dict[str, object]) -> None:
        Turns.__init__(self)
