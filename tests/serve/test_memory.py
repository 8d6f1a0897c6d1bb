"""Memory goes back to the system now and then."""

from __future__ import annotations

import pytest

from paceline.serve import memory
from paceline.serve.memory import PAUSE, Trimmer


def test_not_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [100.0], list[int]()
    monkeypatch.setattr(memory.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(memory, "_malloc_trim", lambda: asked.append)
    trimmer = Trimmer()
    for later in (0.0, PAUSE - 1, PAUSE, PAUSE + 1, 2 * PAUSE):
        now[0] = 100.0 + later
        trimmer.tidy(worked=True)
    assert asked == [0, 0]


def test_what_the_last_work_freed_is_given_back_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [100.0], list[int]()
    monkeypatch.setattr(memory.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(memory, "_malloc_trim", lambda: asked.append)
    trimmer = Trimmer()
    assert trimmer.tidy(worked=False) is None
    now[0] += 1
    assert trimmer.tidy(worked=True) == pytest.approx(PAUSE - 1)
    now[0] += PAUSE
    assert (trimmer.tidy(worked=False), asked) == (None, [0])
    now[0] += 2 * PAUSE
    assert (trimmer.tidy(worked=False), asked) == (None, [0])  # nothing has been done since


def test_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    assert memory._malloc_trim() is None
    monkeypatch.setattr(memory.ctypes, "CDLL", _refuse)
    trimmer = Trimmer()
    trimmer._last -= 2 * PAUSE
    assert trimmer.tidy(worked=True) is None
    assert trimmer._trim is None


def _refuse(name: object) -> None:
    raise OSError
