"""Thompson sampling, which Beta-TS and Cali-TS share (EESD, Algorithm 1)."""

from __future__ import annotations

from random import Random

from paceline.errors import require
from paceline.policies.base import Setting, StoppingPolicy
from paceline.policies.long_run import LongRun
from paceline.registry import AUTO


class ThompsonSampling(StoppingPolicy):
    """theta, the probability that a drafted token is accepted, is drawn from what is known of it; the draw decides.

    As in the paper: the first token of a round is drafted unasked; after every token theta is drawn anew, and drafting
    goes on with probability theta.

    With a `cost`: the draw decides whether to draft at all, as if it were the truth, so that a request that had stopped
    drafting tries again now and then. How far is decided by expectation: go on while some longer draft adds more tokens
    than its cost brings in the long run (see `LongRun`). There is no need to explore lengths, since the target judges
    every draft.

    Args:
        k_max: most tokens a round; the paper sets no bound, but the KV cache needs one.
        cost: of drafting and verifying one more token, in target passes of one token; "auto": as measured, each
            at its place; None: the paper's rule.
    """

    def __init__(self, k_max: int, cost: float | str | None) -> None:
        require(k_max >= 0, f"k_max must be >= 0, not {k_max}")
        valid = cost in (None, AUTO) or (isinstance(cost, int | float) and cost >= 0)
        require(valid, f"cost must be auto, none or a number >= 0, not {cost}")
        self.limit, self.cost, self.reads_costs = k_max, cost, cost == AUTO
        each = 0.0 if cost in (None, AUTO) else float(cost or 0)
        self.long_run = LongRun(lambda drafted: 1 + each * drafted)
        self.random = Random()
        self._all_accepted, self._rate = 1.0, 1.0  # the chance that all drafted are, and the rate in the long run

    def seed(self, seed: int) -> None:
        self.random.seed(seed)

    def check(self, setting: Setting) -> None:
        if self.cost == AUTO:
            self.long_run = LongRun(setting.cost)

    def theta(self, depth: int) -> float:
        """A draw of theta after the token drafted at `depth` (step 8)."""
        raise NotImplementedError

    def first_theta(self) -> float:
        """A draw of theta before anything is drafted."""
        raise NotImplementedError

    def chance(self, depth: int | None) -> float:
        """The mean of theta for the token drafted at `depth`; None: for one that nobody has seen yet."""
        raise NotImplementedError

    def more(self, depth: int) -> bool:
        if depth >= self.limit:
            return False
        if self.cost is not None:
            return self._pays(depth)
        if depth == 0:
            return True
        theta = self.theta(depth - 1)
        return self.random.random() < theta  # step 9

    def observe(self, drafted: int, accepted: int) -> None:
        self.long_run.observe(drafted, accepted)

    def _pays(self, depth: int) -> bool:
        chance = self.chance(None)
        if depth == 0:
            self._all_accepted, self._rate = 1.0, self.long_run.rate(self.long_run.foreseen(chance, self.limit))
            chance = self.first_theta()
        else:
            self._all_accepted *= self.chance(depth - 1)
        return self.long_run.worth(self._rate, depth, self._all_accepted, chance, self.limit) > 0
