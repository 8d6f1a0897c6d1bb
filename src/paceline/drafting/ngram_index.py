"""Where n-grams of a growing text occurred. Token ids only."""

from __future__ import annotations

from collections.abc import Sequence


class NgramIndex:
    """Where each n-gram of a growing sequence occurred, for n = 1 .. longest.

    Incremental: a token costs `longest` dictionary updates, a lookup at most `longest` reads, whatever the context.
    """

    def __init__(self, longest: int, keep: int) -> None:
        self.longest, self.keep = longest, keep
        self._ends: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(longest)]
        self._indexed = 0

    def extend(self, ids: Sequence[int]) -> None:
        """Index the n-grams of `ids` that something follows, that is, all but those at its end."""
        for end in range(self._indexed + 1, len(ids)):
            for n in range(1, min(self.longest, end) + 1):
                ends = self._ends[n - 1].setdefault(tuple(ids[end - n : end]), [])
                ends.append(end)
                if len(ends) > self.keep:
                    del ends[0]
        self._indexed = max(self._indexed, len(ids) - 1)

    def matches(self, ids: list[int], shortest: int) -> tuple[int, list[int]]:
        """Length of the longest suffix of `ids` that occurred before, and where it ended then, latest first."""
        for n in range(min(self.longest, len(ids) - 1), shortest - 1, -1):
            if ends := self._ends[n - 1].get(tuple(ids[-n:])):
                return n, ends[::-1]
        return 0, []
