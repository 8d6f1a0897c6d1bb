"""Drafts from where n-grams of a growing text occurred (prompt lookup decoding, Saxena, 2023). Ids only."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.drafting.lookup import Candidates, DraftSource, copied, likely
from paceline.drafting.ngram_index import NgramIndex


class NgramLookup(DraftSource):
    """What followed the last n-gram where it occurred before. See `drafters.prompt_lookup.PromptLookup`."""

    source = "prompt-lookup"

    def __init__(self, longest: int, shortest: int, branches: int) -> None:
        self.longest, self.shortest, self.branches = longest, shortest, branches

    def to_chains(self) -> None:
        self.branches = 1

    def begin(self, ids: Sequence[int]) -> NgramIndex:
        memory = NgramIndex(self.longest)
        memory.extend(ids)
        return memory

    def propose(self, ids: list[int], memory: NgramIndex, depth: int, most: int, min_score: float = 0.0) -> Candidates:
        memory.extend(ids)
        matched, ends = memory.matches(ids, self.shortest, self.branches)
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
