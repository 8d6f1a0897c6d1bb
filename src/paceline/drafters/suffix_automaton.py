"""The suffix automaton of a growing text, and drafts from it (SAM-Decoding, Hu et al., 2024). Token ids only."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.drafting.lookup import Candidates, DraftSource, chain, copied, likely
from paceline.drafting.shared_texts import SharedTexts


class SuffixAutomaton:
    """The suffix automaton of a growing token sequence, with the longest earlier occurrence of its current suffix.

    Appending a token takes amortised constant time (Blumer et al., 1985). State `s` stands for the substrings that end
    at the same places; `end[s]` is the first of those places, `length[s]` their greatest length.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._end = [-1], [0], [0]
        self._last = 0  # the state of the whole sequence, whose link is that of its longest suffix that occurred before

    @property
    def matched(self) -> int:
        """Length of the longest suffix that occurred before."""
        return self._length[self._link[self._last]] if self._last else 0

    @property
    def match_end(self) -> int:
        """Index right after the first occurrence of the last `matched` tokens."""
        return self._end[self._link[self._last]] if self._last else 0

    def append(self, token: int) -> None:
        self.ids.append(token)
        state = self._state({}, -1, len(self.ids), len(self.ids))
        at = self._last
        while at >= 0 and token not in self._next[at]:
            self._next[at][token] = state
            at = self._link[at]
        if at < 0:
            self._link[state] = 0
        else:
            self._link[state] = self._split(at, token)
        self._last = state

    def _split(self, at: int, token: int) -> int:
        """The state of exactly `at`'s longest substring followed by `token`, cut out of a longer one if need be."""
        target = self._next[at][token]
        if self._length[target] == self._length[at] + 1:
            return target
        clone = self._state(dict(self._next[target]), self._link[target], self._length[at] + 1, self._end[target])
        while at >= 0 and self._next[at].get(token) == target:
            self._next[at][token] = clone
            at = self._link[at]
        self._link[target] = clone
        return clone

    def _state(self, successors: dict[int, int], link: int, length: int, end: int) -> int:
        self._next.append(successors)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1

    def extend(self, ids: Sequence[int]) -> None:
        """Append what of a text it has not yet."""
        for token in ids[len(self.ids) :]:
            self.append(token)


class SuffixLookup(DraftSource):
    """What followed the longest suffix of the text when it occurred before. See `drafters.suffix.Suffix`.

    Args:
        shortest: length of a match.
        shared: what earlier texts said, where they may be copied from.
    """

    source = "suffix"

    def __init__(self, shortest: int, shared: SharedTexts | None = None) -> None:
        self.shortest, self.shared = shortest, shared

    def begin(self, ids: Sequence[int]) -> SuffixAutomaton:
        memory = SuffixAutomaton()
        memory.extend(ids)
        return memory

    def propose(
        self, ids: list[int], memory: SuffixAutomaton, depth: int, most: int, min_score: float = 0.0
    ) -> Candidates:
        memory.extend(ids)
        count, longest = min(depth, most), memory.matched
        at = memory.match_end
        tokens = copied(ids, at, count) if longest >= self.shortest else []
        if self.shared:
            found, at = self.shared.longest(ids)
            if found > longest:
                longest, tokens = found, self.shared.after(at, count)
        scores, score = list[float](), 1.0
        for matched in range(longest, longest + len(tokens)):
            score *= likely(matched)
            if score < min_score:
                break
            scores.append(score)
        return chain(tokens[: len(scores)], scores, self.source)
