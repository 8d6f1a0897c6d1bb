"""Prompt lookup decoding (Saxena, 2023): copy what followed the last n-gram when it stood in the context before."""

from __future__ import annotations

from paceline.drafters.ngram_lookup import NgramLookup
from paceline.drafting.tree_drafter import LookupDrafter
from paceline.errors import require
from paceline.registry import AUTO
from paceline.targets.target import Target


class PromptLookup(LookupDrafter):
    """What followed the last n-gram where it stood in the context before.

    Args:
        ngram: longest n-gram looked up; shorter ones are tried down to `shortest`.
        branches: how many different earlier occurrences to follow at once, latest first, merged into one tree.
        budget: most nodes of the tree; "auto": as many as pay on this machine.
    """

    default_policy = "fixed:k=10"
    source = "prompt-lookup"

    def __init__(
        self, target: Target, *, ngram: int = 3, shortest: int = 1, branches: int = 1, budget: int | str = AUTO
    ) -> None:
        require(1 <= shortest <= ngram, f"prompt-lookup: need 1 <= shortest <= ngram, not {shortest} and {ngram}")
        require(branches >= 1, f"prompt-lookup: branches must be >= 1, not {branches}")
        super().__init__(target, budget, NgramLookup(ngram, shortest, branches))
        self.branches = branches

    def max_nodes(self, depth: int) -> int:
        return min(depth * self.branches, self.max_candidates)
