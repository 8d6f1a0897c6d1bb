"""AdaEDL: entropy-based early draft stopping (Agrawal et al., 2024)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from paceline.errors import require
from paceline.policies.sureness import Sureness, sureness
from paceline.policies.threshold import AdaptiveThreshold


class AdaEDL(AdaptiveThreshold):
    """Stop when `1 - sqrt(gamma H(q)) < lambda`: an approximate lower bound on the acceptance probability, by
    Pinsker's inequality with the cross-entropy taken as `(1 + gamma') H(q)`; H in nats.
    """

    def __init__(
        self,
        *,
        gamma: float = 0.2,
        k_max: int = 7,
        threshold: float = 0.4,
        alpha: float = 0.9,
        epsilon: float = 0.01,
        beta1: float = 0.5,
        beta2: float = 0.9,
        keep_last: bool = False,
    ) -> None:
        require(gamma > 0, f"adaedl: gamma must be > 0, not {gamma}")
        super().__init__(
            k_max=k_max,
            threshold=threshold,
            alpha=alpha,
            epsilon=epsilon,
            beta1=beta1,
            beta2=beta2,
            keep_last=keep_last,
        )
        self.gamma = gamma

    def score(self, q: Float[Tensor, " vocab"] | Sureness) -> float:
        lacking: float = (self.gamma * max(sureness(q).entropy, 0.0)) ** 0.5
        return 1 - lacking
