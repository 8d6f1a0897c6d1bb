"""Suffix-automaton lookup (SAM-Decoding, Hu et al., 2024): follow the longest suffix that occurred before."""

from __future__ import annotations

from paceline.drafters.suffix_automaton import SuffixAutomaton, SuffixLookup
from paceline.drafting.base import Row
from paceline.drafting.shared_texts import PROCESS, REQUEST, SHARES, SharedTexts
from paceline.drafting.tree_drafter import LookupDrafter
from paceline.errors import require
from paceline.registry import AUTO
from paceline.targets.target import Target


class Suffix(LookupDrafter):
    """What followed the longest suffix of the context when it occurred before.

    Args:
        shortest: shortest match worth following; one token matches nearly always and says little.
        share: "process": texts of earlier requests are matched as well, a bounded number of their tokens. The speed of
            one request then tells about the text of others. "request": each has its own only.
        budget: most tokens of a draft; "auto": as many as pay on this machine.
    """

    default_policy = "fixed:k=10"
    source = "suffix"

    def __init__(self, target: Target, *, shortest: int = 2, share: str = REQUEST, budget: int | str = AUTO) -> None:
        require(shortest >= 1, f"suffix: shortest must be >= 1, not {shortest}")
        require(share in SHARES, f"suffix: share is {' or '.join(SHARES)}, not '{share}'")
        self.shared = SharedTexts(max(shortest, 2)) if share == PROCESS else None
        super().__init__(target, budget, SuffixLookup(shortest, self.shared))

    def max_nodes(self, depth: int) -> int:
        return min(depth, self.max_candidates)

    def forget(self, row: Row, memory: SuffixAutomaton) -> None:
        if self.shared:
            self.shared.add(row.ids)
