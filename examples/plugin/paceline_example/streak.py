"""Streak: one token more than were accepted last."""

from __future__ import annotations

from paceline.errors import require
from paceline.policies.base import StoppingPolicy


class Streak(StoppingPolicy):
    """Args:
    k_max: most tokens to draft.
    """

    def __init__(self, *, k_max: int = 8) -> None:
        require(k_max >= 1, f"streak: k_max must be >= 1, not {k_max}")
        self.limit = k_max  # sizes the KV cache
        self.wanted = 1

    def more(self, depth: int) -> bool:
        return depth < self.wanted

    def observe(self, drafted: int, accepted: int) -> None:
        self.wanted = min(accepted + 1, self.limit)
