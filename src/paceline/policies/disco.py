"""DISCO (Mamou et al., 2024): stop when a small classifier of the draft distribution expects a rejection."""

from __future__ import annotations

from paceline.errors import require
from paceline.policies.trained import TrainedStop
from paceline.registry import AUTO


class Disco(TrainedStop):
    """The classifier sees the largest draft probabilities and the depth; stop when it gives a token less than a
    threshold of being accepted.

    Args:
        predictor: its file, from `paceline train stop-predictor`; "auto": the one trained on this machine, else
            the one that comes with the drafter.
        threshold: the paper's tau.
        k_max: most tokens a round.
        keep_last: draft the token whose forward is already paid for, then stop, instead of dropping it.
    """

    name = "disco"
    reads_q = True

    def __init__(
        self, *, predictor: str = AUTO, threshold: float = 0.5, k_max: int = 20, keep_last: bool = True
    ) -> None:
        require(0 <= threshold <= 1, f"disco: threshold must lie in [0, 1], not {threshold}")
        super().__init__(predictor, k_max, keep_last)
        self.threshold = threshold

    def stops(self, acceptance: float) -> bool:
        return acceptance < self.threshold
