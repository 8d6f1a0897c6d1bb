"""Where n-grams of a growing text occurred. Ids only."""

from __future__ import annotations

from collections.abc import Sequence


class NgramIndex:
    """Where each n-gram of a growing sequence occurred, for n = 1 .. longest.

    Incremental: a token costs `longest` dictionary updates, a lookup at most `longest` reads, whatever the context.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._latest: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest)]  # where an n-gram ended last,
        self._earlier: list[list[int]] = [[0] * (n + 1) for n in range(longest)]  # and before it ended there; 0: never
        self._indexed = 0

    def extend(self, ids: Sequence[int]) -> None:
        """Index the n-grams of `ids` that something follows, that is, all but those at its end."""
        for n, (latest, earlier) in enumerate(zip(self._latest, self._earlier, strict=True), start=1):
            for end in range(max(self._indexed + 1, n), len(ids)):
                ngram = tuple(ids[end - n : end])
                earlier.append(latest.get(ngram, 0))
                latest[ngram] = end
        self._indexed = max(self._indexed, len(ids) - 1)

    def matches(self, last: Sequence[int], shortest: int = 1, most: int = 1) -> tuple[int, list[int]]:
        """Length of the longest suffix of `last` that something followed before, and where it ended then, latest first.

        Args:
            last: tokens at the end of the sequence, or after it; of more than `longest` the last count. The whole of
                it is no match.
            shortest: suffix that is looked for.
            most: places to give.
        """
        for n in range(min(self.longest, len(last) - 1), shortest - 1, -1):
            if end := self._latest[n - 1].get(tuple(last[-n:])):
                ends = [end]
                while len(ends) < most and (end := self._earlier[n - 1][end]):
                    ends.append(end)
                return n, ends
        return 0, []
