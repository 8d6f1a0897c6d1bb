"""When a call's tokens came: what is waited for the first ones, and what the others take."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Any, NamedTuple

from transformers.generation.streamers import BaseStreamer


class Latency(NamedTuple):
    """Of one prompt of a call.

    Attributes:
        first: seconds from the call to its first tokens, which a round of drafts may have several of.
        decode: seconds from these to its last.
        tokens: how many came in this time.
    """

    first: float
    decode: float
    tokens: int


class Arrivals:
    """Notes when tokens of each prompt come; the clock starts with it."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._notes: dict[Hashable, list[tuple[float, int]]] = {}  # seconds, and tokens by then

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self._began

    def note(self, prompt: Hashable, tokens: int) -> None:
        """More tokens of a prompt are here; it has so many by now."""
        self._notes.setdefault(prompt, []).append((self.seconds, tokens))

    def recount(self, prompt: Hashable, tokens: int) -> None:
        """What was noted of a prompt were pieces of fewer tokens, so many: each is a like part of them."""
        pieces = self._notes[prompt][-1][1]
        self._notes[prompt] = [(seconds, -(-count * tokens // pieces)) for seconds, count in self._notes[prompt]]

    def latency(self, prompt: Hashable, tokens: int) -> Latency:
        """Of a prompt that has come to an end, with so many tokens: others of its batch may have gone on."""
        notes = self._notes[prompt]
        first, already = notes[0]
        last = next((seconds for seconds, count in notes if count >= tokens), notes[-1][0])
        return Latency(first, last - first, max(tokens - already, 0))


class ArrivalStreamer(BaseStreamer):
    """Shows transformers' `generate` to an `Arrivals`: the tokens of all rows come together."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals, self._tokens, self._rows = arrivals, 0, 0

    def put(self, value: Any) -> None:
        """The prompts, then tokens: `[rows]`, or `[1, tokens]` where several were accepted."""
        if not self._rows:
            self._rows = len(value)
            return
        self._tokens += value.numel() // self._rows
        self._arrivals.note(0, self._tokens)

    def end(self) -> None:
        """Nothing more comes."""
