"""Drafting as optimal stopping of a renewal process: is a longer draft worth more than its time brings otherwise?"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

START = 8.0  # plain rounds' worth of time by which the rate that is foreseen weighs
RENEWED = 8  # rounds after which costs are asked for again
FADING = 0.5 ** (1 / 100)  # what was seen counts half after 100 rounds


class Rate:
    """rho: tokens by the time of a plain round, of the rounds that were seen lately."""

    def __init__(self) -> None:
        self._tokens = self._time = 0.0  # fading

    def __call__(self, foreseen: float = 1.0) -> float:
        """`foreseen` is what it is thought to be before rounds show it."""
        return (START * foreseen + self._tokens) / (START + self._time)

    def observe(self, tokens: float, time: float) -> None:
        """A round brought so many, in so many plain rounds' time."""
        self._tokens = self._tokens * FADING + tokens
        self._time = self._time * FADING + time


class LongRun:
    """Rounds bring tokens and take time; over many of them most tokens a second come when each round maximises its
    tokens less rho times its time, where rho is the rate reached in the long run (renewal reward; Dinkelbach's form of
    a fraction's maximum). Maximising each round's own tokens by time is something else wherever rounds differ: it stops
    too early where drafts are good, and goes on too far where they are bad.

    Args:
        cost: of a round by how many tokens it drafts and verifies, in rounds without a draft. What it says stands for
            some rounds, since it is needed often.
        pass_cost: likewise of verifying alone; None: as `cost`.

    Attributes:
        rate: rho so far.
    """

    def __init__(self, cost: Callable[[int], float], pass_cost: Callable[[int], float] | None = None) -> None:
        self.cost, self._costs = cost, list[float]()
        self._pass_cost, self._pass_costs = pass_cost or cost, list[float]()
        self.rate = Rate()
        self._rounds = 0

    def foreseen(self, chance: float, limit: int) -> float:
        """The rate of the best fixed length of at most `limit`, where each token is right with this probability."""
        best = tokens = reached = 1.0
        for cost in self._up_to(limit)[1:]:
            reached *= chance
            tokens += reached
            best = max(best, tokens / cost)
        return best

    def one_more(self, depth: int, limit: int) -> tuple[float, float]:
        """What drafting one token more than `depth` takes, of at most `limit`, and what verifying it takes."""
        costs, passes = self._up_to(limit), self._pass_costs
        verifying = passes[depth + 1] - passes[depth]
        return costs[depth + 1] - costs[depth] - verifying, verifying

    def worth(self, rate: float, depth: int, reached: float, chance: float, limit: int) -> float:
        """What the best longer draft is expected to add to one of `depth` tokens, in tokens, less its time; 0 where
        none is worth it.

        Args:
            rate: rho.
            reached: the probability that all so far are right.
            chance: that the next is, and each after it, if those before are.
        """
        best = tokens = 0.0
        costs = self._up_to(limit)
        for cost in costs[depth + 1 :]:
            reached *= chance
            tokens += reached
            best = max(best, tokens - rate * (cost - costs[depth]))
        return best

    def follow(self, earlier: LongRun) -> None:
        """Begin with what an earlier one has seen."""
        self.rate = copy(earlier.rate)

    def observe(self, drafted: int, accepted: int, free: float = 0.0) -> None:
        """A round's outcome; `free`: of what drafting so many tokens costs, that of those which took no forward."""
        self.rate.observe(accepted + 1, self.cost(drafted) - free if drafted else 1.0)
        self._rounds += 1
        if self._rounds % RENEWED == 0:
            self._costs.clear()

    def _up_to(self, limit: int) -> list[float]:
        """What rounds of 0 to `limit` tokens cost."""
        if len(self._costs) != limit + 1:
            self._costs = [self.cost(length) for length in range(limit + 1)]
            self._pass_costs = [self._pass_cost(length) for length in range(limit + 1)]
        return self._costs
