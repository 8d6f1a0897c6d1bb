"""What time it is where something is decoded: the machine's, or in a replay a made-up one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class MadeUpClock:
    """Stands still until it is told how long something took."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def spend(self, seconds: float) -> None:
        self.seconds += seconds


_made_up: ContextVar[MadeUpClock | None] = ContextVar("made_up", default=None)


def now() -> float:
    """Seconds since any fixed moment."""
    clock = _made_up.get()
    return time.perf_counter() if clock is None else clock.now()


@contextmanager
def made_up(clock: MadeUpClock) -> Iterator[MadeUpClock]:
    """Inside, in this thread, `now` is what this clock says."""
    token = _made_up.set(clock)
    try:
        yield clock
    finally:
        _made_up.reset(token)
