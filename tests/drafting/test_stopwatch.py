"""What something is thought to take, from what it took."""

from __future__ import annotations

import pytest

from paceline.drafting.stopwatch import Stopwatch


def test_one_burst_hardly_moves_a_stopwatch() -> None:
    stopwatch = Stopwatch()
    for _ in range(5):
        stopwatch.learn(1.0)
    stopwatch.learn(100.0)
    assert stopwatch.seconds < 1.2
    stopwatch.learn(1.0)
    assert stopwatch.seconds == pytest.approx(1.0)


@pytest.mark.parametrize("takes", [0.1, 10.0])
def test_a_stopwatch_follows(takes: float) -> None:
    """Round by round, or at once where nobody has asked for long."""
    stopwatch, rested = Stopwatch(), Stopwatch()
    for one in (stopwatch, rested):
        one.learn(1.0)
    for _ in range(30):
        stopwatch.learn(takes)
        rested.idle()
    assert stopwatch.seconds == pytest.approx(takes)
    rested.learn(takes)
    assert rested.seconds == pytest.approx(takes)


def test_a_first_time_that_was_slow_is_soon_forgotten() -> None:
    """It loads code; later such a time is a burst of another program's."""
    stopwatch = Stopwatch()
    for seconds in (9.0, 1.0, 1.0, 1.0, 1.0, 0.1):
        stopwatch.learn(seconds)
    assert stopwatch.seconds == pytest.approx(1 / 1.1)


def test_a_source_that_was_slow_once_is_asked_again() -> None:
    """Within as many rounds as a profile taken under load needs to be put right."""
    stopwatch = Stopwatch()
    stopwatch.learn(2.0)
    for _ in range(200):
        stopwatch.idle()
    assert stopwatch.seconds == pytest.approx(1.0)


def test_what_was_asked_in_vain_is_asked_ever_more_rarely() -> None:
    """Until it is asked in two rounds running."""
    stopwatch, waits = Stopwatch(patient=True), []
    stopwatch.learn(8.0)
    for _ in range(4):
        waits.append(0)
        while stopwatch.seconds > 1.0:
            stopwatch.idle()
            waits[-1] += 1
        stopwatch.learn(8.0)
    assert waits == pytest.approx([600, 1200, 1800, 2400], abs=1)
    stopwatch.learn(8.0)
    for _ in range(200):
        stopwatch.idle()
    assert stopwatch.seconds == pytest.approx(4.0)
