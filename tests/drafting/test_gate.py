"""Which sources are asked: those that bring more than their time would, and others ever more rarely."""

from __future__ import annotations

from random import Random

import pytest

from paceline.drafting.gate import Gate


def asked(gate: Gate, gains: list[float], without: float = 0.0, seed: int = 0) -> list[bool]:
    """Whether it was asked, where these would be its gains round after round."""
    random, found = Random(seed), []
    for gain in gains:
        found.append(gate.asks(without, random))
        if found[-1]:
            gate.learn(without, gain)
    return found


def test_what_pays_is_asked() -> None:
    random = Random(1)
    found = asked(Gate(), [random.choice([0.0, 0.0, 0.9]) - 0.1 for _ in range(400)])
    assert sum(found[50:]) > 0.97 * 350


def test_what_never_pays_is_asked_ever_more_rarely() -> None:
    found = asked(Gate(), [-0.05] * 600)
    assert found[0]
    first, later = sum(found[:100]), sum(found[300:])
    assert later / 300 < 0.5 * first / 100
    assert later > 0  # texts change


def test_what_comes_to_pay_is_found_out() -> None:
    gate = Gate()
    asked(gate, [-0.05] * 200)
    assert sum(asked(gate, [0.5] * 400)[200:]) > 150


def test_it_depends_on_what_there_is_already() -> None:
    gate = Gate()
    for _ in range(100):
        gate.learn(0.0, 0.5)
        gate.learn(1.5, -0.3)
    random = Random(0)
    assert all(gate.asks(0.0, random) for _ in range(50))
    assert not any(gate.asks(1.5, random) for _ in range(50))


@pytest.mark.parametrize("gain", [0.5, -0.5])
def test_a_request_begins_with_what_others_have_shown(gain: float) -> None:
    known = Gate()
    asked(Gate(known), [gain] * 100)
    for _ in range(100):
        Gate(known).learn(0.0, gain)
    random = Random(0)
    assert sum(Gate(known).asks(0.0, random) for _ in range(50)) == (50 if gain > 0 else 0)
