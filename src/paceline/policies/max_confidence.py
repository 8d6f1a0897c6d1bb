"""Stop when the drafter's best token is not likely enough: AdaEDL's baseline, with AdaEDL's adaptive lambda."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from paceline.policies.sureness import Sureness
from paceline.policies.threshold import AdaptiveThreshold


class MaxConfidence(AdaptiveThreshold):
    """Stop when `max q < lambda`."""

    def score(self, q: Float[Tensor, " vocab"] | Sureness) -> float:
        return q.top if isinstance(q, Sureness) else q.max().item()
