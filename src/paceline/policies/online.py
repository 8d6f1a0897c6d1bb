"""Logistic regression that learns while it is used."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, log1p, pi, sqrt
from operator import mul

SURE = 1e-4  # no probability of which odds are taken is closer to 0 or 1


class OnlineLogistic:
    """Weights are Gaussian, and stay so: each outcome moves mean and covariance by one Newton step (Spiegelhalter and
    Lauritzen, 1990). Nothing to tune but how sure it is at the start. A handful of features: numpy would take longer.

    Args:
        weights: mean of the weights at the start.
        variance: of each, then.
    """

    def __init__(self, weights: Sequence[float], variance: float = 1.0) -> None:
        self.mean = [float(weight) for weight in weights]
        places = range(len(self.mean))
        self.covariance = [[variance if row == column else 0.0 for column in places] for row in places]

    def probability(self, features: Sequence[float]) -> float:
        """Of a success, averaged over what is not known of the weights (MacKay's approximation)."""
        mean, variance = self.log_odds(features)
        return sigmoid(mean / sqrt(1 + pi * variance / 8))

    def log_odds(self, features: Sequence[float]) -> tuple[float, float]:
        """Mean and variance of what is believed of a success's."""
        return dot(self.mean, features), dot(features, self._spread(features))

    def learn(self, features: Sequence[float], success: float) -> None:
        """Of one outcome: 1 or 0, or the probability of a success where it stays unknown."""
        p = sigmoid(dot(self.mean, features))
        gain = self._spread(features)
        scale = 1 / (1 + p * (1 - p) * dot(features, gain))
        for row, own in zip(self.covariance, gain, strict=True):
            step = p * (1 - p) * scale * own
            row[:] = [value - step * other for value, other in zip(row, gain, strict=True)]
        error = scale * (success - p)
        self.mean = [weight + error * own for weight, own in zip(self.mean, gain, strict=True)]

    def copy(self) -> OnlineLogistic:
        made = OnlineLogistic(self.mean)
        made.covariance = [list(row) for row in self.covariance]
        return made

    def doubt(self, variance: float) -> None:
        """Be so much less sure of each weight."""
        for place, row in enumerate(self.covariance):
            row[place] += variance

    def _spread(self, features: Sequence[float]) -> list[float]:
        return [dot(row, features) for row in self.covariance]


def dot(some: Sequence[float], others: Sequence[float]) -> float:
    return float(sum(map(mul, some, others)))


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x)) if x >= 0 else exp(x) / (1 + exp(x))


def log_odds(chance: float) -> float:
    chance = min(max(chance, SURE), 1 - SURE)
    return log(chance) - log1p(-chance)
