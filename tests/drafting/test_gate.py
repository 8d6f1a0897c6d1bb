"""Which sources are asked: those that bring more than their time would, and others ever more rarely."""

from __future__ import annotations

from random import Random

import pytest

from paceline.drafting.gate import Gate


def asked(gate: Gate, gains: list[float], lost: float = 0.0, without: float = 0.0, seed: int = 0) -> list[bool]:
    """Whether it was asked, where these would be its gains round after round."""
    random, found = Random(seed), []
    for gain in gains:
        found.append(gate.asks(without, lost, random))
        if found[-1]:
            gate.learn(without, gain)
    return found


def test_what_pays_is_asked() -> None:
    random = Random(1)
    found = asked(Gate(), [random.choice([0.0, 0.0, 0.9]) for _ in range(400)], lost=0.1)
    assert sum(found[50:]) > 0.97 * 350


def test_what_never_pays_is_asked_ever_more_rarely() -> None:
    found = asked(Gate(), [0.0] * 600, lost=0.05)
    assert found[0]
    first, later = sum(found[:100]), sum(found[300:])
    assert later / 300 < 0.5 * first / 100
    assert later > 0  # texts change


def test_what_comes_to_pay_is_found_out() -> None:
    gate = Gate()
    asked(gate, [0.0] * 200, lost=0.05)
    assert sum(asked(gate, [0.5] * 400, lost=0.05)[200:]) > 150


def test_it_may_begin_with_what_another_knows_and_tell_it_nothing() -> None:
    greedy, random = Gate(), Random(0)
    asked(greedy, [0.5] * 400, lost=0.05)
    sampled, kept = Gate(greedy, tells=False), greedy.kept()
    assert all(sampled.asks(0.0, 0.3, random) for _ in range(50))
    asked(sampled, [0.0] * 400, lost=0.05)
    assert not any(sampled.asks(0.0, 0.3, random) for _ in range(50))
    assert greedy.kept() == kept


def test_it_depends_on_what_there_is_already() -> None:
    gate = Gate()
    for _ in range(100):
        gate.learn(0.0, 0.5)
        gate.learn(1.5, 0.1)
    random = Random(0)
    assert all(gate.asks(0.0, 0.3, random) for _ in range(50))
    assert not any(gate.asks(1.5, 0.3, random) for _ in range(50))


@pytest.mark.parametrize("gain", [1.0, 0.0])
def test_rounds_of_a_new_kind_begin_with_what_the_others_have_shown(gain: float) -> None:
    gate, random = Gate(), Random(0)
    for _ in range(100):
        gate.learn(0.0, gain)
    assert sum(gate.asks(1.5, 0.3, random) for _ in range(50)) == 50 * gain
    for _ in range(60):
        gate.learn(1.5, 1.0 - gain)  # until they show otherwise
    assert sum(gate.asks(1.5, 0.3, random) for _ in range(50)) == 50 * (1.0 - gain)


@pytest.mark.parametrize("gain", [1.0, 0.0])
def test_a_request_begins_with_what_others_have_shown(gain: float) -> None:
    known = Gate()
    asked(Gate(known), [gain] * 100)
    for _ in range(100):
        Gate(known).learn(0.0, gain)
    random = Random(0)
    assert sum(Gate(known).asks(0.0, 0.5, random) for _ in range(50)) == 50 * gain


@pytest.mark.parametrize("of", ["own", "before"])
def test_beliefs_follow_at_once(of: str) -> None:
    """Whoever learned."""
    known = Gate()
    gate, random = Gate(known), Random(0)
    assert sum(gate.asks(0.0, 0.1, random) for _ in range(100)) > 50
    for _ in range(300):
        (gate if of == "own" else known).learn(0.0, -1.0)
    assert not any(gate.asks(0.0, 0.1, random) for _ in range(100))
