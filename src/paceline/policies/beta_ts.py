"""Beta-TS: draft on with a probability drawn from the Beta posterior of the acceptance rate (EESD, Algorithm 2)."""

from __future__ import annotations

from paceline.errors import require
from paceline.policies.thompson import ThompsonSampling

MOST = 1e12  # of what a prior is made of: far beyond it random numbers are none
LEAST = 1e-2  # of a and b: the printed update can take a below 0, where there is no Beta distribution


class BetaTS(ThompsonSampling):
    """theta ~ Beta(a, b). With A of K drafted tokens accepted, the target has judged n = min(A + 1, K) of them, and
    a grows by r = A, b by n - r: the conjugate update for theta as the probability that a drafted token is accepted.

    The paper prints r = A - 1. Theta then falls towards 0, and every draft becomes one token long, however good drafts
    are: with acceptance probability p and K drawn by theta, even r = max(A - 1, 0) has E[r] / E[n] = p^2 theta.

    Args:
        a0, b0: of the prior; a0 / (a0 + b0) is the acceptance rate expected, their sum its weight in tokens.
        k_max: most tokens a round.
        cost: of one more token, in target passes; "auto": as measured; none: the paper's rule. See `ThompsonSampling`.
        literal: r as printed, with a and b kept above 0.
    """

    def __init__(
        self,
        *,
        a0: float = 1.0,
        b0: float = 1.0,
        k_max: int = 16,
        cost: float | str | None = None,
        literal: bool = False,
    ) -> None:
        valid = 0 < a0 <= MOST and 0 < b0 <= MOST
        require(valid, f"beta-ts: a0 and b0 must be > 0 and at most {MOST:g}, not {a0} and {b0}")
        super().__init__(k_max, cost)
        self.a, self.b, self.literal = a0, b0, literal

    def theta(self, depth: int) -> float:
        return self.random.betavariate(self.a, self.b)  # step 8

    def first_theta(self) -> float:
        return self.theta(0)

    def chance(self, depth: int | None) -> float:
        return self.a / (self.a + self.b)

    def observe(self, drafted: int, accepted: int) -> None:
        super().observe(drafted, accepted)
        if drafted == 0:
            return
        r = accepted - 1 if self.literal else accepted  # step 18
        n = min(accepted + 1, drafted)  # step 19
        self.a, self.b = self.a + r, self.b + n - r  # steps 20, 21
        if self.literal:
            self.a, self.b = max(self.a, LEAST), max(self.b, LEAST)
