"""Where n-grams of a growing text occurred, and drafts from it (prompt lookup decoding, Saxena, 2023). Ids only."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.drafters.suffix_automaton import likely
from paceline.drafting.lookup import Candidates, DraftSource, copied


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


class NgramLookup(DraftSource):
    """What followed the last n-gram where it occurred before. See `drafters.prompt_lookup.PromptLookup`."""

    source = "prompt-lookup"

    def __init__(self, longest: int, shortest: int, branches: int) -> None:
        self.longest, self.shortest, self.branches = longest, shortest, branches

    def to_chains(self) -> None:
        self.branches = 1

    def begin(self, ids: Sequence[int]) -> NgramIndex:
        memory = NgramIndex(self.longest, keep=self.branches)
        memory.extend(ids)
        return memory

    def propose(self, ids: list[int], memory: NgramIndex, depth: int, most: int, min_score: float = 0.0) -> Candidates:
        memory.extend(ids)
        matched, ends = memory.matches(ids, self.shortest)
        found, places = Candidates([], [], [], []), dict[tuple[int, int], int]()
        for branch, end in enumerate(ends):
            node, score = 0, 0.5**branch
            for at, token in enumerate(copied(ids, end, depth)):
                score *= likely(matched + at)
                if (node, token) not in places:
                    if len(found.tokens) == most:
                        break
                    found.add(token, node, score, self.source)
                    places[node, token] = len(found.tokens)
                node = places[node, token]
        return found
