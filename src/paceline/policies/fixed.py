"""Always the same draft length."""

from __future__ import annotations

from paceline.errors import require
from paceline.policies.base import StoppingPolicy


class Fixed(StoppingPolicy):
    """Draft `k` tokens every round; `k = 0` is plain decoding."""

    def __init__(self, *, k: int = 5) -> None:
        require(k >= 0, f"fixed: k must be >= 0, not {k}")
        self.limit = k

    def reach(self, most: int) -> int:
        return max(min(most, self.limit), 0)
