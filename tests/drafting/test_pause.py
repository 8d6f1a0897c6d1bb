"""Whether a batch drafts: where drafts bring less than the time for them, it pauses, and tries again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.drafting.pause import Pause


def drafted(
    pause: Pause, gain: Callable[[int], float], rounds: int = 400, rows: int = 1, seconds: float = 0.1
) -> list[bool]:
    """Whether it did, round by round, where drafts bring so much and take so long, at a token a second."""
    found = []
    for at in range(rounds):
        found.append(not pause.pauses(rows))
        if found[-1]:
            pause.learn(rows, gain(at), rate=1.0, seconds=seconds)
    return found


def test_it_drafts_where_that_pays() -> None:
    """However rare the rounds are that bring something."""
    assert all(drafted(Pause(), lambda at: 0.5))
    assert sum(drafted(Pause(), lambda at: 1.0 if at % 4 == 0 else 0.0)) > 0.9 * 400


@pytest.mark.parametrize("gain", [0.0, 0.02])
def test_it_pauses_where_nothing_pays(gain: float) -> None:
    found = drafted(Pause(), lambda at: gain)
    assert all(found[:8])
    assert 0 < sum(found[100:]) < 0.2 * 300


def test_it_goes_on_when_the_text_changes() -> None:
    pause = Pause()
    drafted(pause, lambda at: 0.0)
    found = drafted(pause, lambda at: 0.8)
    assert all(found[40:])


def test_each_size_of_batch_by_itself() -> None:
    pause = Pause()
    drafted(pause, lambda at: 0.0, rows=8)
    assert sum(drafted(pause, lambda at: 0.5, rows=1)) == 400


def test_requests_that_sample_by_themselves() -> None:
    pause = Pause()
    for _ in range(100):
        pause.learn(1, 0.0, rate=1.0, seconds=0.1, sampling=True)
    assert sum(pause.pauses(1, True) for _ in range(100)) > 50
    assert not pause.pauses(1, False)


def test_what_takes_next_to_nothing_is_never_left_out() -> None:
    assert all(drafted(Pause(), lambda at: 0.0, seconds=0.003))


def test_what_takes_little_is_left_out_only_where_it_has_long_brought_nothing() -> None:
    """Then as before in another text: what drafts are worth there shows soon enough."""
    assert sum(drafted(Pause(), lambda at: 0.2 if at % 4 == 0 else 0.0, seconds=0.01)) > 0.9 * 400
    pause = Pause()
    hopeless = drafted(pause, lambda at: 0.0, seconds=0.01)
    assert all(hopeless[:32])
    assert 0 < sum(hopeless[200:]) < 0.5 * 200
    assert all(drafted(pause, lambda at: 0.5, seconds=0.01)[40:])
