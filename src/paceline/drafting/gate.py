"""Whether a source of candidates is worth asking this round."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from math import isfinite, sqrt
from random import Random

EDGES = (0.02, 0.1, 0.3, 0.8)  # of what is gained without the source: what it adds depends on it
HOPE, SPREAD = 0.2, 0.3  # tokens that an unknown source is expected to add, and their standard deviation
WEIGHT = 6.0  # rounds: what is expected of an unknown source counts as much as the outcome of so many,
ALIKE = 24.0  # and what other requests have shown of it as that of so many
FADING = 0.5 ** (1 / 300)
LEAST = 1e-3  # variance that is always left

Seen = tuple[float, float, float]  # a count of gains, their sum, the sum of their squares
NOTHING: Seen = (0.0, 0.0, 0.0)


class Gate:
    """What a source brings when it is asked, in tokens: how much more the round is expected to gain with its candidates
    than without. It is asked where a draw from what is believed of the mean is above what its time would bring
    otherwise (Thompson sampling): mostly where that pays, ever more rarely where it never did.

    Args:
        before: what is believed before anything is seen; None: a hope.
        fading: what was seen counts so much less each time that the source is asked.
        alike: rounds whose outcome weighs as much, at most, as what is believed before.
        tells: whether `before` learns of all that is seen.
    """

    def __init__(
        self, before: Gate | None = None, fading: float = FADING, alike: float = ALIKE, tells: bool = True
    ) -> None:
        self._before, self._told, self._fading, self._alike = before, before if tells else None, fading, alike
        self._seen = [NOTHING] * (len(EDGES) + 1)  # count, sum and squares of gains, fading
        self._all = NOTHING  # of these together

    def asks(self, without: float, lost: float, random: Random) -> bool:
        """Whether to ask the source.

        Args:
            without: tokens that the round gains already.
            lost: tokens that the time for asking would bring otherwise.
        """
        mean, variance, count = self._belief(bisect(EDGES, without))
        return random.gauss(mean, sqrt(variance / count)) > lost

    def learn(self, without: float, gain: float) -> None:
        """It was asked, and brought so much."""
        kind, fading = bisect(EDGES, without), self._fading
        count, total, squares = before = self._seen[kind]
        self._seen[kind] = after = count * fading + 1.0, total * fading + gain, squares * fading + gain * gain
        self._all = _moved(self._all, before, after)
        if self._told:
            self._told.learn(without, gain)

    def kept(self) -> list[list[float]]:
        """What was seen, ready for JSON: see `restore`."""
        return [list(seen) for seen in self._seen]

    def restore(self, kept: Sequence[Sequence[float]]) -> None:
        """Go on from what another had seen. Raises ValueError for what none could have."""
        found = [tuple(float(value) for value in seen) for seen in kept]
        whole = len(found) == len(self._seen) and all(len(seen) == 3 for seen in found)
        if not whole or not all(isfinite(value) and seen[0] >= 0 for seen in found for value in seen):
            raise ValueError("a gate has a count, a sum and squares by kind")
        self._seen = [(count, total, squares) for count, total, squares in found]
        self._all = NOTHING
        for seen in self._seen:
            self._all = _moved(self._all, NOTHING, seen)

    def _belief(self, kind: int) -> tuple[float, float, float]:
        """Mean, variance and how many rounds they rest on."""
        if self._before:
            mean, variance, known = self._before._belief(kind)
            return _updated(mean, variance, min(known, self._alike), self._seen[kind])
        # A source that is new to rounds of a kind is expected to do there what it did in those of other kinds.
        others = _moved(self._all, self._seen[kind], NOTHING)
        mean, variance, _ = _updated(HOPE, SPREAD**2, WEIGHT, others)
        return _updated(mean, variance, WEIGHT, self._seen[kind])


def _moved(seen: Seen, before: Seen, after: Seen) -> Seen:
    """With `after` in place of `before`."""
    return seen[0] - before[0] + after[0], seen[1] - before[1] + after[1], seen[2] - before[2] + after[2]


def _updated(mean: float, variance: float, weight: float, seen: Seen) -> tuple[float, float, float]:
    """Mean, variance and weight of what is believed, after a count, a sum and squares of gains."""
    count, total, squares = seen
    together = weight + count
    updated = (weight * mean + total) / together
    spread = (weight * (variance + mean**2) + squares) / together - updated**2
    return updated, max(spread, LEAST), together
