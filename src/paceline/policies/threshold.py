"""The adaptive threshold that AdaEDL and its max-confidence baseline share (AdaEDL, section 3.2)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from paceline.errors import require
from paceline.policies.base import StoppingPolicy
from paceline.policies.sureness import Sureness


class AdaptiveThreshold(StoppingPolicy):
    """Stop when a score of the draft distribution falls under lambda, which follows the acceptance rate.

    Args:
        k_max: most tokens a round.
        threshold: initial lambda.
        alpha: acceptance rate aimed at.
        epsilon: step of lambda.
        beta1: smoothing of the acceptance rate.
        beta2: smoothing of lambda.
        keep_last: append the token whose forward is already paid for, then stop, instead of dropping it.
    """

    reads_q = True
    reads_sureness = True

    def __init__(
        self,
        *,
        k_max: int = 7,
        threshold: float = 0.4,
        alpha: float = 0.9,
        epsilon: float = 0.01,
        beta1: float = 0.5,
        beta2: float = 0.9,
        keep_last: bool = False,
    ) -> None:
        name = type(self).__name__.lower()
        require(k_max >= 0, f"{name}: k_max must be >= 0, not {k_max}")
        for option, value in (("alpha", alpha), ("beta1", beta1), ("beta2", beta2)):
            require(0 <= value <= 1, f"{name}: {option} must lie in [0, 1], not {value}")
        require(epsilon >= 0, f"{name}: epsilon must be >= 0, not {epsilon}")
        self.limit, self.threshold, self.keep_last = k_max, threshold, keep_last
        self.alpha, self.epsilon, self.beta1, self.beta2 = alpha, epsilon, beta1, beta2
        self.acceptance_rate = alpha  # neutral start: the first rounds move lambda by what they show
        self._stopped = False

    def score(self, q: Float[Tensor, " vocab"] | Sureness) -> float:
        """An estimate of the probability that a token drawn from `q` is accepted."""
        raise NotImplementedError

    def more(self, depth: int) -> bool:
        if depth == 0:
            self._stopped = False
        return depth < self.limit and not self._stopped

    def keep(self, q: Float[Tensor, " vocab"] | Sureness | None, depth: int, hidden: Tensor | None = None) -> bool:
        if q is None or self.score(q) >= self.threshold:
            return True
        self._stopped = True
        return self.keep_last

    def observe(self, drafted: int, accepted: int) -> None:
        # A round without a draft says nothing of acceptance; counted as good, it lowers lambda so drafting can resume.
        rate = accepted / drafted if drafted else 1.0
        self.acceptance_rate = self.beta1 * self.acceptance_rate + (1 - self.beta1) * rate
        if self.acceptance_rate < self.alpha:
            proposal = self.threshold + self.epsilon
        elif accepted != self.limit:
            proposal = self.threshold - self.epsilon
        else:
            proposal = self.threshold
        self.threshold = self.beta2 * self.threshold + (1 - self.beta2) * proposal
