"""What earlier requests of a process said: a bounded memory that later ones may copy from."""

from __future__ import annotations

from collections.abc import Sequence

REQUEST, PROCESS = SHARES = ("request", "process")  # who shares a memory
LONGEST = 32  # tokens of a match that are looked at
MOST = 1 << 17  # tokens that are kept
END = -1  # between texts


class SharedTexts:
    """The latest texts, and where each of their n-grams stood last.

    Args:
        n: the shortest match.
        most: tokens that are kept; beyond, the older half is forgotten.
    """

    def __init__(self, n: int, most: int = MOST) -> None:
        self.n, self.most = n, most
        self.tokens: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}  # by n-gram, the place after its latest occurrence

    def add(self, ids: Sequence[int]) -> None:
        """A request has ended, and this was its text."""
        first = len(self.tokens)
        self.tokens += [*ids[-self.most // 2 :], END]
        self._index(first)
        if len(self.tokens) > self.most:
            self.tokens = self.tokens[-self.most // 2 :]
            self._behind = {}
            self._index(0)

    def longest(self, ids: Sequence[int]) -> tuple[int, int]:
        """How many of the last tokens of `ids` occurred, at most `LONGEST`, and the place after them; 0 for none."""
        at = self._behind.get(tuple(ids[-self.n :]), 0) if len(ids) >= self.n else 0
        if not at:
            return 0, 0
        matched, most = self.n, min(LONGEST, len(ids), at)
        while matched < most and self.tokens[at - 1 - matched] == ids[-1 - matched]:
            matched += 1
        return matched, at

    def after(self, at: int, count: int) -> list[int]:
        """At most `count` tokens from that place on, to the end of their text."""
        found = self.tokens[at : at + count]
        return found[: found.index(END)] if END in found else found

    def _index(self, first: int) -> None:
        for at in range(first + self.n, len(self.tokens)):
            gram = tuple(self.tokens[at - self.n : at + 1])
            if END not in gram:  # a text's end is followed by nothing
                self._behind[gram[:-1]] = at
