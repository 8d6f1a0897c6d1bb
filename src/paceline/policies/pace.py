"""`pace`: draft one more token where it brings more than its time does in the long run."""

from __future__ import annotations

from math import isfinite, pi, sqrt
from random import Random

from jaxtyping import Float
from torch import Tensor

from paceline.errors import require
from paceline.policies.base import Setting, StoppingPolicy
from paceline.policies.long_run import LongRun
from paceline.policies.online import OnlineLogistic, dot, log_odds, sigmoid
from paceline.policies.sureness import Sureness, sureness

# Weights before anything is seen: of 1, depth, recent acceptance fast and slow, and then
AHEAD = (0.5, 0.0, 0.0, 0.0, 0.5)  # the log odds of the token before
SEEN = (0.2, 0.0, 0.0, 0.0, 0.7, -0.2)  # those of the token itself, and the entropy it was drawn at
VARIANCE, DOUBT = 0.2, 1e-4  # of a weight at the start, and what is added each round: texts change
OTHER = 0.005  # what another request's text adds to that variance
SMOOTHING = (0.5, 0.9)  # of recent acceptance
SURPRISE, WEIGHT = 1.0, 10.0  # squared log odds by which a distribution differs from what was expected; as of so many
FADING = 0.99  # tokens, each of which counts so much less than the next
STREAK, LONGEST = 4, 4  # rounds in a row without a draft after which another one rests, and most that rest


class Pace(StoppingPolicy):
    """Optimal stopping of a renewal process (see `LongRun`), for drafters that pay for each token.

    Before a token is drafted the question is whether that is worth its time; after it, when its distribution is known,
    whether the token is worth verifying. Two logistic regressions that learn from the request's outcomes say how likely
    it is accepted: one of what is known beforehand (depth, recent acceptance, how sure the token before was), one of
    the draft distribution's top probability and entropy as well. How far the two are apart, as a rule, tells what it is
    worth to draft a token and then decide. Each round the first is as hopeful, or as doubtful, as a draw from what is
    believed of it (Thompson sampling), so that drafting that was given up is tried again. A request begins with what
    the one that began before it has learned with the same drafter.

    Where round after round has no draft the question is put more rarely, since it takes time as well, and more
    hopefully then: with the best of the draws of all rounds since the last time.

    Args:
        k_max: most tokens a round.
    """

    name = "pace"
    reads_q = True
    reads_sureness = True
    reads_costs = True
    copies = True

    def __init__(self, *, k_max: int = 16) -> None:
        require(k_max >= 0, f"pace: k_max must be >= 0, not {k_max}")
        self.limit = k_max
        self.ahead, self.seen = OnlineLogistic(AHEAD, VARIANCE), OnlineLogistic(SEEN, VARIANCE)
        self.long_run = LongRun(lambda drafted: 1.0)
        self._before: dict[type, StoppingPolicy] | None = {}  # see `Setting`; None once this request has begun
        self.random = Random()
        self.recent = [0.0, 0.0]  # of first tokens, less a half
        self._surprise = [SURPRISE * WEIGHT, WEIGHT]  # sum of squares, and count
        self._hope = 0.0  # this round's, in standard deviations of what is believed
        self._streak = self._rests = self._rested = 0  # rounds without a draft, to rest still, and since the last draw
        self._features: list[tuple[list[float], list[float] | None]] = []  # of this round's tokens
        self._reached, self._rate, self._last, self._stopped = 1.0, 1.0, 0.0, False
        self._free = 0.0  # of what a round's tokens would take to draft: that of those which took no forward

    def seed(self, seed: int) -> None:
        self.random.seed(seed)

    def check(self, setting: Setting) -> None:
        self.long_run, self._before = LongRun(setting.cost, setting.pass_cost), setting.before

    def more(self, depth: int) -> bool:
        if depth == 0:
            if self._rests:
                self._rests, self._rested = self._rests - 1, self._rested + 1
                return False
            self._begin()
        if depth >= self.limit or self._stopped:
            return False
        features = self._ahead(depth)
        drafting, verifying = self.long_run.one_more(depth, self.limit)
        if self._promise(depth, self._chance(features), verifying) <= self._rate * drafting:
            if depth == 0:
                self._streak += 1 + self._rested
                self._rests, self._rested = min(self._streak // STREAK, LONGEST), 0
            return False
        self._streak = self._rested = 0
        self._features[depth:] = [(features, None)]
        return True

    def takes(self, sure: Sureness, depth: int) -> bool:
        if depth == 0:
            self._begin()
            self._rested = 0
        if depth >= self.limit or self._stopped:
            return False
        self._features[depth:] = [(self._ahead(depth), None)]
        if kept := self.keep(sure, depth):
            self._free += self.long_run.one_more(depth, self.limit)[0]
        return kept

    def keep(self, q: Float[Tensor, " vocab"] | Sureness | None, depth: int, hidden: Tensor | None = None) -> bool:
        ahead, _ = self._features[depth]
        if q is None:  # a drafter of deterministic candidates, which asks how deep only: there are no surprises
            self._surprise[0] = 0.0
            self._reached *= self._chance(ahead)
            return True
        sure = sureness(q)
        if not (isfinite(sure.top) and isfinite(sure.entropy)):  # nothing that could be learned from
            self._stopped = True
            return False
        self._last = log_odds(sure.top)
        features = [*ahead[:-1], self._last, sure.entropy]
        self._features[depth] = ahead, features
        odds = dot(self.seen.mean, features)
        surprise = (odds - dot(self.ahead.mean, ahead)) ** 2
        self._surprise = [FADING * old + new for old, new in zip(self._surprise, (surprise, 1.0), strict=True)]
        self._reached *= sigmoid(odds)
        chance = self._chance(self._ahead(depth + 1))
        worth = self._reached + self.long_run.worth(self._rate, depth + 1, self._reached, chance, self.limit)
        _, verifying = self.long_run.one_more(depth, self.limit)
        self._stopped = worth <= self._rate * verifying
        return not self._stopped

    def observe(self, drafted: int, accepted: int) -> None:
        self.long_run.observe(drafted, accepted, self._free)
        right = [float(depth < accepted) for depth in range(min(accepted + 1, drafted))]
        for (ahead, seen), success in zip(self._features, right, strict=False):
            self.ahead.learn(ahead, success)
            if seen is not None:
                self.seen.learn(seen, success)
        if self._stopped and accepted == drafted and (refused := self._features[drafted:]):
            # What would have become of the token that was not worth verifying is never known. Were it left out, `ahead`
            # would learn from good ones only, and expect too much.
            (ahead, seen), *_ = refused
            if seen is not None:
                right.append(sigmoid(dot(self.seen.mean, seen)))
                self.ahead.learn(ahead, right[-1])
        if right:
            first = right[0] - 0.5
            self.recent = [kept * old + (1 - kept) * first for kept, old in zip(SMOOTHING, self.recent, strict=True)]
        self._forget_round()  # the next may ask nothing

    def _begin(self) -> None:
        if self._before is not None:
            if isinstance(earlier := self._before.get(Pace), Pace):
                self._follow(earlier)
            self._before[Pace], self._before = self, None
        self._forget_round()
        for model in (self.ahead, self.seen):
            model.doubt(DOUBT * (1 + self._rested))
        self._hope = max(self.random.gauss(0, 1) for _ in range(1 + self._rested))
        mean = sigmoid(dot(self.ahead.mean, self._ahead(0)))
        self._rate = self.long_run.rate(self.long_run.foreseen(mean, self.limit))

    def _forget_round(self) -> None:
        self._features.clear()
        self._reached, self._last, self._stopped, self._free = 1.0, 0.0, False, 0.0

    def _follow(self, earlier: Pace) -> None:
        """Begin with what an earlier request has taught."""
        self.ahead, self.seen = earlier.ahead.copy(), earlier.seen.copy()
        for model in (self.ahead, self.seen):
            model.doubt(OTHER)
        self.recent = [earlier.recent[-1]] * len(self.recent)
        self._surprise = list(earlier._surprise)
        self.long_run.follow(earlier.long_run)

    def _ahead(self, depth: int) -> list[float]:
        """What is known of the token at `depth` before it is drafted."""
        return [1.0, min(depth, 4) / 4, *self.recent, self._last]

    def _promise(self, depth: int, chance: float, verifying: float) -> float:
        """What drafting the token at `depth` is expected to bring. It is verified only where that turns out to be worth
        the time: its distribution may look better or worse than was thought, by a standard deviation.
        """
        squares, count = self._surprise
        variance = squares / count
        middle, brings = log_odds(chance) * sqrt(1 + pi * variance / 8), 0.0  # of the two: see `OnlineLogistic`
        for odds in (middle - sqrt(variance), middle + sqrt(variance)):
            reached = self._reached * sigmoid(odds)
            longer = self.long_run.worth(self._rate, depth + 1, reached, chance, self.limit)
            brings += max(reached + longer - self._rate * verifying, 0.0) / 2
        return brings

    def _chance(self, ahead: list[float]) -> float:
        """That the token is accepted, as this round sees it."""
        mean, variance = self.ahead.log_odds(ahead)
        return sigmoid(mean + self._hope * sqrt(variance))
