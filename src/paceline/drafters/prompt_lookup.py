"""Prompt lookup decoding (Saxena, 2023): copy what followed the last n-gram when it stood in the context before."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.drafters.base import Drafter, Row
from paceline.drafters.tree import TokenTree
from paceline.registry import require
from paceline.targets.target import Target


class NgramIndex:
    """Where each n-gram of a growing sequence occurred, for n = 1 .. longest.

    Incremental: a token costs `longest` dictionary updates, a lookup at most `longest` reads, whatever the context.
    """

    def __init__(self, longest: int, keep: int) -> None:
        self.longest, self.keep = longest, keep
        self._ends: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(longest)]
        self._indexed = 0

    def extend(self, ids: list[int]) -> None:
        """Index the n-grams of `ids` that something follows, that is, all but those at its end."""
        for end in range(self._indexed + 1, len(ids)):
            for n in range(1, min(self.longest, end) + 1):
                ends = self._ends[n - 1].setdefault(tuple(ids[end - n : end]), [])
                ends.append(end)
                if len(ends) > self.keep:
                    del ends[0]
        self._indexed = max(self._indexed, len(ids) - 1)

    def matches(self, ids: list[int], shortest: int) -> list[int]:
        """Where the longest matching suffix of `ids` ended before, latest first."""
        for n in range(min(self.longest, len(ids) - 1), shortest - 1, -1):
            if ends := self._ends[n - 1].get(tuple(ids[-n:])):
                return ends[::-1]
        return []


class PromptLookup(Drafter):
    """Args:
    ngram: longest n-gram looked up; shorter ones are tried down to `shortest`.
    branches: how many different earlier occurrences to follow at once, latest first, merged into one tree.
    """

    default_policy = "fixed:k=5"
    source = "prompt-lookup"

    def __init__(self, target: Target, *, ngram: int = 3, shortest: int = 1, branches: int = 1) -> None:
        super().__init__(target)
        require(1 <= shortest <= ngram, f"prompt-lookup: need 1 <= shortest <= ngram, not {shortest} and {ngram}")
        require(branches >= 1, f"prompt-lookup: branches must be >= 1, not {branches}")
        self.ngram, self.shortest, self.branches = ngram, shortest, branches

    def max_nodes(self, depth: int) -> int:
        return depth * self.branches

    def begin(self, row: Row, hidden: object) -> None:
        row.state = NgramIndex(self.ngram, keep=self.branches)

    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        return [self._lookup(row) for row in rows]

    def _lookup(self, row: Row) -> TokenTree:
        tree = TokenTree.root(row.ids[-1])
        if row.room == 0 or not row.policy.more(0):
            return tree
        length = 1
        while length < row.room and row.policy.more(length):
            length += 1
        row.state.extend(row.ids)
        for end in row.state.matches(row.ids, self.shortest):
            tree.add_path(row.ids[end : end + length], self.source)
        return tree
