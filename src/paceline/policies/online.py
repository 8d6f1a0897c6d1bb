"""Logistic regression that learns while it is used."""

from __future__ import annotations

from math import exp, pi, sqrt

import numpy as np
from jaxtyping import Float


class OnlineLogistic:
    """Weights are Gaussian, and stay so: each outcome moves mean and covariance by one Newton step (Spiegelhalter and
    Lauritzen, 1990). Nothing to tune but how sure it is at the start.

    Args:
        weights: mean of the weights at the start.
        variance: of each, then.
    """

    def __init__(self, weights: Float[np.ndarray, " features"], variance: float = 1.0) -> None:
        self.mean = np.array(weights, dtype=np.float64)
        self.covariance = np.eye(len(self.mean)) * variance

    def probability(self, features: Float[np.ndarray, " features"]) -> float:
        """Of a success, averaged over what is not known of the weights (MacKay's approximation)."""
        spread = features @ self.covariance @ features
        return sigmoid(float(self.mean @ features) / sqrt(1 + pi * spread / 8))

    def learn(self, features: Float[np.ndarray, " features"], success: bool) -> None:
        p = sigmoid(float(self.mean @ features))
        gain = self.covariance @ features
        gain_after = gain / (1 + p * (1 - p) * (features @ gain))
        self.covariance -= p * (1 - p) * np.outer(gain_after, gain)
        self.mean += gain_after * (success - p)


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x)) if x >= 0 else exp(x) / (1 + exp(x))
