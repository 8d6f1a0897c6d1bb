"""The heuristic of transformers' assisted generation: two more after a full acceptance, else one less."""

from __future__ import annotations

from paceline.errors import require
from paceline.policies.base import StoppingPolicy


class Schedule(StoppingPolicy):
    """`num_assistant_tokens_schedule="heuristic"` of transformers: K += 2 when all drafted tokens were accepted,
    else K -= 1, between 1 and `max`.

    Args:
        k: draft length of the first round.
        max: upper bound, which transformers leaves open; it sizes the KV cache.
    """

    def __init__(self, *, k: int = 5, max: int = 32) -> None:
        require(1 <= k <= max, f"schedule: k must be between 1 and max = {max}, not {k}")
        self.limit, self.k = max, k

    def more(self, depth: int) -> bool:
        return depth < self.k

    def observe(self, drafted: int, accepted: int) -> None:
        if drafted:
            self.k = min(self.k + 2, self.limit) if accepted == drafted else max(self.k - 1, 1)
