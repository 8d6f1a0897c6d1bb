"""The adaptive layer (ADED, Algorithm 2): n-grams of a request's own tokens, counted as they come.

Counts stand apart from the stored matrix, which many requests share: the search puts a probability together from both
when it asks for one, so that no request changes what another one sees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Integer

from paceline.drafters.trigram.kernels import Kernels, kernels
from paceline.drafters.trigram.structures import ENTRIES, Counts, empty_counts, place_of

FADED = 1 / 16  # decaying counts below this are dropped when room is made


class Overlay:
    """Growing counts of the n-grams of orders `shortest` to `longest`.

    Args:
        half_life: tokens after which a count is worth half; by default counts stay.
        compiled: what does the counting; default numba's.
    """

    def __init__(
        self,
        longest: int,
        shortest: int = 2,
        half_life: float = math.inf,
        room: int = 1024,
        compiled: Kernels | None = None,
    ) -> None:
        self.longest, self.shortest, self.half_life = longest, shortest, half_life
        self._compiled = compiled or kernels()
        self.counts = empty_counts(room)
        self.place = place_of(self.counts)
        self._clock = 0.0  # half-lives since counts were last scaled

    @property
    def scale(self) -> float:
        """What a stored count is multiplied with to be worth its decayed value."""
        return math.pow(2.0, -self._clock)

    def learn(self, ids: Sequence[int], start: int) -> None:
        """Algorithm 2's loop: count once more each n-gram of `ids` whose last token is at `start` or later."""
        start = max(start, 0)
        new = len(ids) - start
        if new <= 0:
            return
        self._make_room(new * (self.longest - self.shortest + 1))
        begin = max(start - self.longest + 1, 0)
        # Newer counts grow instead of older ones being scaled down one by one.
        self._compiled.learn(self, ids[begin:], start - begin, self.shortest, self.longest, 2.0**self._clock)
        self._clock += new / self.half_life

    def _make_room(self, entries: int) -> None:
        counts = self.counts
        if counts.used[ENTRIES] + entries <= len(counts.entries) and self._clock < 32:
            return
        if math.isfinite(self.half_life):
            counts = self._copied(counts, len(counts.entries), self.scale, FADED)
            self._clock = 0.0
        if 2 * (counts.used[ENTRIES] + entries) > len(counts.entries):
            counts = self._copied(counts, 2 * (len(counts.entries) + entries), 1.0, 0.0)
        self.counts, self.place = counts, place_of(counts)

    def _copied(self, counts: Counts, room: int, factor: float, least: float) -> Counts:
        copy = empty_counts(room)
        self._compiled.rebuild(counts, copy, factor, least)
        return copy


def places(overlays: Sequence[Overlay]) -> Integer[np.ndarray, "texts 5"]:
    """Where the arrays of their counts lie in memory, and the sizes of the first two."""
    return np.array([overlay.place for overlay in overlays], np.int64).reshape(len(overlays), 5)
