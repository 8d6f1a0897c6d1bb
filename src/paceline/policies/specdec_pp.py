"""SpecDec++ (Huang et al., 2024): stop when a rejection among the drafted tokens has become likely."""

from __future__ import annotations

from paceline.errors import require
from paceline.policies.trained import TrainedStop
from paceline.registry import AUTO


class SpecDecPP(TrainedStop):
    """A head on the draft's hidden states says how likely each token is accepted; stop when the probability that at
    least one of them is rejected, 1 minus the product, passes a threshold.

    Args:
        predictor: its file, from `paceline train stop-predictor`; "auto": the one trained on this machine, else
            the one that comes with the drafter.
        threshold: the paper's h.
        k_max: most tokens a round.
        keep_last: draft the token whose forward is already paid for, then stop, instead of dropping it.
    """

    name = "specdec++"
    reads_hidden = True

    def __init__(
        self, *, predictor: str = AUTO, threshold: float = 0.7, k_max: int = 20, keep_last: bool = True
    ) -> None:
        require(0 <= threshold <= 1, f"specdec++: threshold must lie in [0, 1], not {threshold}")
        super().__init__(predictor, k_max, keep_last)
        self.threshold = threshold
        self.all_accepted = 1.0  # the probability, of the tokens drafted in this round

    def more(self, depth: int) -> bool:
        if depth == 0:
            self.all_accepted = 1.0
        return super().more(depth)

    def stops(self, acceptance: float) -> bool:
        self.all_accepted *= acceptance
        return 1 - self.all_accepted > self.threshold
