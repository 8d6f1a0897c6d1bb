"""Prompt lookup decoding (Saxena, 2023): copy what followed the last n-gram when it stood in the context before."""

from __future__ import annotations

from paceline.drafters.suffix import likely
from paceline.drafting.base import Row
from paceline.drafting.tree import TokenTree
from paceline.drafting.tree_drafter import TreeDrafter
from paceline.errors import require
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

    def matches(self, ids: list[int], shortest: int) -> tuple[int, list[int]]:
        """Length of the longest suffix of `ids` that occurred before, and where it ended then, latest first."""
        for n in range(min(self.longest, len(ids) - 1), shortest - 1, -1):
            if ends := self._ends[n - 1].get(tuple(ids[-n:])):
                return n, ends[::-1]
        return 0, []


class PromptLookup(TreeDrafter):
    """What followed the last n-gram where it stood in the context before.

    Args:
        ngram: longest n-gram looked up; shorter ones are tried down to `shortest`.
        branches: how many different earlier occurrences to follow at once, latest first, merged into one tree.
        budget: most nodes of the tree; "auto": as many as pay on this machine.
    """

    default_policy = "fixed:k=10"
    source = "prompt-lookup"

    def __init__(
        self, target: Target, *, ngram: int = 3, shortest: int = 1, branches: int = 1, budget: int | str = "auto"
    ) -> None:
        super().__init__(target, budget)
        require(1 <= shortest <= ngram, f"prompt-lookup: need 1 <= shortest <= ngram, not {shortest} and {ngram}")
        require(branches >= 1, f"prompt-lookup: branches must be >= 1, not {branches}")
        self.ngram, self.shortest, self.branches = ngram, shortest, branches

    def max_nodes(self, depth: int) -> int:
        return min(depth * self.branches, self.max_candidates)

    def remember(self, row: Row) -> NgramIndex:
        memory = NgramIndex(self.ngram, keep=self.branches)
        memory.extend(row.ids)
        return memory

    def propose(self, row: Row, memory: NgramIndex, depth: int, min_score: float) -> TokenTree:
        memory.extend(row.ids)
        matched, ends = memory.matches(row.ids, self.shortest)
        tree = TokenTree.root(row.ids[-1])
        for branch, end in enumerate(ends):
            self._follow(tree, row.ids[end : end + depth], matched, 0.5**branch)
        return tree

    def _follow(self, tree: TokenTree, tokens: list[int], matched: int, score: float) -> None:
        node = 0
        for at, token in enumerate(tokens):
            score *= likely(matched + at)
            child = tree.child(node, token)
            if child is None:
                if tree.drafted == self.max_candidates:
                    return
                child = tree.add(token, node, self.source, score=score)
            node = child
