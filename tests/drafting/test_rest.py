"""Whether a batch drafts: where drafts bring less than the time for them, it rests, and tries again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.drafting.rest import Rest


def drafted(rest: Rest, gain: Callable[[int], float], rounds: int = 400, rows: int = 1) -> list[bool]:
    """Whether it did, round by round, where drafts bring so much and a tenth of a second each, at a token a second."""
    found = []
    for at in range(rounds):
        found.append(not rest.rests(rows))
        if found[-1]:
            rest.learn(rows, gain(at), rate=1.0, seconds=0.1)
    return found


def test_it_drafts_where_that_pays() -> None:
    """However rare the rounds are that bring something."""
    assert all(drafted(Rest(), lambda at: 0.5))
    assert sum(drafted(Rest(), lambda at: 1.0 if at % 4 == 0 else 0.0)) > 0.9 * 400


@pytest.mark.parametrize("gain", [0.0, 0.02])
def test_it_rests_where_nothing_pays(gain: float) -> None:
    found = drafted(Rest(), lambda at: gain)
    assert all(found[:8])
    assert 0 < sum(found[100:]) < 0.2 * 300


def test_it_goes_on_when_the_text_changes() -> None:
    rest = Rest()
    drafted(rest, lambda at: 0.0)
    found = drafted(rest, lambda at: 0.8)
    assert sum(found[100:]) > 0.95 * 300


def test_each_size_of_batch_by_itself() -> None:
    rest = Rest()
    drafted(rest, lambda at: 0.0, rows=8)
    assert sum(drafted(rest, lambda at: 0.5, rows=1)) == 400
