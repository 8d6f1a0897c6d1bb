"""When tokens come: of one prompt and of several, from paceline's rounds and from transformers' streams."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from paceline.bench.latency import Arrivals, ArrivalStreamer, Latency


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=10.0)
    monkeypatch.setattr("paceline.bench.latency.time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def test_first_tokens_and_those_behind_them(clock: SimpleNamespace) -> None:
    arrivals = Arrivals()
    for now, prompt, tokens in ((11.0, "a", 1), (12.0, "b", 3), (14.0, "a", 4), (15.0, "b", 4)):
        clock.now = now
        arrivals.note(prompt, tokens)
    assert arrivals.latency("a", 4) == Latency(1.0, 3.0, 3)
    assert arrivals.latency("b", 4) == Latency(2.0, 3.0, 1)
    assert arrivals.seconds == 5.0


@pytest.mark.parametrize(("rows", "pieces"), [(1, [(1,), (1,), (1,)]), (3, [(3,), (3,), (3,)]), (1, [(1, 2), (1, 1)])])
def test_transformers_streams(clock: SimpleNamespace, rows: int, pieces: list[tuple[int, ...]]) -> None:
    """Tokens of all rows at once, or several of one row."""
    arrivals = Arrivals()
    streamer = ArrivalStreamer(arrivals)
    streamer.put(torch.zeros(rows, 7, dtype=torch.long))
    for piece in pieces:
        clock.now += 1.0
        streamer.put(torch.zeros(piece, dtype=torch.long))
    streamer.end()
    first = pieces[0][-1] if len(pieces[0]) == 2 else 1
    assert arrivals.latency(0, 3) == Latency(1.0, len(pieces) - 1.0, 3 - first)


def test_pieces_of_tokens(clock: SimpleNamespace) -> None:
    """Six pieces that turn out to be three tokens: the first came with the first piece, the others in what followed."""
    arrivals = Arrivals()
    for count in range(1, 7):
        clock.now += 1
        arrivals.note("a", count)
    arrivals.recount("a", 3)
    assert arrivals.latency("a", 3) == (1, 4, 2)


def test_rows_of_a_batch_end_at_times_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals = Arrivals()
    times = iter(range(1, 129))
    monkeypatch.setattr(Arrivals, "seconds", property(lambda self: float(next(times))))
    for tokens in range(1, 129):
        arrivals.note(0, tokens)
    assert arrivals.latency(0, 10) == Latency(1.0, 9.0, 9)
    assert arrivals.latency(0, 128) == Latency(1.0, 127.0, 127)
