"""Thompson sampling, which Beta-TS and Cali-TS share (EESD, Algorithm 1)."""

from __future__ import annotations

from random import Random

from paceline.policies.base import StoppingPolicy
from paceline.registry import require


class ThompsonSampling(StoppingPolicy):
    """The first token of a round is drafted unasked. Behind every token theta, the probability that drafting on is
    right, is drawn from what is known of it, and then whether to go on, with probability theta.

    Args:
        k_max: most tokens a round; the paper sets no bound, but the KV cache needs one.
    """

    def __init__(self, k_max: int) -> None:
        require(k_max >= 0, f"k_max must be >= 0, not {k_max}")
        self.limit = k_max
        self.random = Random()

    def seed(self, seed: int) -> None:
        self.random.seed(seed)

    def theta(self, depth: int) -> float:
        """A draw of theta behind the token drafted at `depth` (step 8)."""
        raise NotImplementedError

    def more(self, depth: int) -> bool:
        if depth == 0 or depth >= self.limit:
            return depth < self.limit
        theta = self.theta(depth - 1)
        return self.random.random() < theta  # step 9
