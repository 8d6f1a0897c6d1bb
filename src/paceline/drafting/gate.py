"""Whether a source of candidates is worth asking this round."""

from __future__ import annotations

from bisect import bisect
from math import sqrt
from random import Random

EDGES = (0.02, 0.1, 0.3, 0.8)  # of what is gained without the source: what it adds depends on it
HOPE, SPREAD = 0.2, 0.3  # tokens that an unknown source is expected to add, and their standard deviation
WEIGHT = 6.0  # rounds whose outcome weighs as much as what was believed before
FADING = 0.5 ** (1 / 300)  # what was seen counts half after so many times that the source was asked
LEAST = 1e-3  # variance that is always left


class Gate:
    """What a source brings when it is asked, in tokens: by how much the round is expected to gain more with its
    candidates than without, less what the time for drafting them would bring otherwise. It is asked where a draw from
    what is believed of its mean is above 0 (Thompson sampling): mostly where that pays, ever more rarely where it never
    did.

    Args:
        before: what is believed before anything is seen, and is told of all that is; None: a hope.
    """

    def __init__(self, before: Gate | None = None) -> None:
        self._before = before
        self._seen = [[0.0, 0.0, 0.0] for _ in range(len(EDGES) + 1)]  # count, sum and squares of gains, fading

    def asks(self, without: float, random: Random) -> bool:
        """Whether to ask the source, where the round gains `without` tokens already."""
        mean, variance, count = self._belief(bisect(EDGES, without))
        return random.gauss(mean, sqrt(variance / count)) > 0

    def learn(self, without: float, gain: float) -> None:
        """It was asked, and brought so much."""
        seen = self._seen[bisect(EDGES, without)]
        for at, value in enumerate((1.0, gain, gain**2)):
            seen[at] = seen[at] * FADING + value
        if self._before:
            self._before.learn(without, gain)

    def _belief(self, kind: int) -> tuple[float, float, float]:
        """Mean, variance and how many rounds they rest on."""
        mean, variance, _ = self._before._belief(kind) if self._before else (HOPE, SPREAD**2, WEIGHT)
        count, total, squares = self._seen[kind]
        together = WEIGHT + count
        updated = (WEIGHT * mean + total) / together
        spread = (WEIGHT * (variance + mean**2) + squares) / together - updated**2
        return updated, max(spread, LEAST), together
