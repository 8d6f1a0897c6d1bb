"""How many tokens each request of a step drafts: those that bring more than their time does.

All requests of a step share its time, so they share one budget. Of all candidates the most probable N are verified,
where N maximises the tokens expected less what the time for them brings in the long run: the rule of
`drafting.budget` and `policies.long_run`, for a whole batch. Around that maximum little changes, so some more are
verified: a text then takes fewer steps, for a little of the speed (`VLLMSettings.worth`). What a step costs is measured
from outside, as the time between two proposals, by the tokens in it: one for each request, and those that it verified.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from math import log2
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Integer

from paceline.drafting.budget import CLASSES, Calibration
from paceline.integrations.vllm.settings import ALL_OR_NOTHING, RAGGED
from paceline.policies.long_run import Rate
from paceline.targets.cost_model import Changes, LearnedCosts

if TYPE_CHECKING:
    from paceline.drafting.lookup import Candidates

#: Tokens of a step at which costs are kept: all that vLLM verifies in one.
WIDTHS = [2**octave for octave in range(17)]
SLOPE = 0.03  # of the time of a step over one token, that one more is thought to cost before any was seen
GUESSED = 1.0  # standard deviation of that, in logarithms
CHANGES = Changes(step=0.02, speed=0.01, width=0.001)  # all costs are learned from steps, so these say more of shapes
ALWAYS = ((np.inf, 1),)  # beside a step, learning from it takes no time
FURTHER = 2.0  # a step has at most so many times the tokens of the widest one before it, where it may have any number


class Lengths:
    """Chooses how far the requests of each step draft.

    Args:
        most: tokens that a request drafts at most.
        mode, worth: of `VLLMSettings`.
    """

    def __init__(self, most: int, mode: str, worth: float) -> None:
        self.most, self.mode, self.worth = most, mode, worth
        self._costs: LearnedCosts | None = None  # of steps by their tokens; there was none yet
        self._widest = 0  # tokens of a step so far
        self._rate = Rate()  # of a request, in plain steps
        self._rates: defaultdict[int, Rate] = defaultdict(Rate)  # by load: with another one other drafts pay

    def rate(self, rows: int) -> float:
        """Tokens that a request gets in the time of a plain step, in the long run: rho of `policies.long_run`."""
        return self._rates[_load(rows)](self._rate())

    def relative(self, rows: int, drafted: float) -> float:
        """What a step costs in which each request drafts so many, in plain steps."""
        return float(self._seconds(rows * (1.0 + drafted)) / self._seconds(rows))

    def _seconds(self, tokens: Any) -> Any:
        """Of steps over so many tokens; before any was seen, in steps over one."""
        return _guess(tokens) if self._costs is None else np.interp(tokens, self._costs.widths, self._costs.base)

    def observe(self, rows: int, drafted: int, emitted: int, seconds: float) -> None:
        """The outcome of a step.

        Args:
            drafted: tokens that it verified beside each request's last.
            emitted: tokens that came of it.
        """
        if self._costs is None:
            if drafted:
                return
            scale = seconds / _guess(rows)
            self._costs = LearnedCosts(
                {width: scale * _guess(width) for width in WIDTHS},
                measured=GUESSED,
                changes=CHANGES,
                learned_from=ALWAYS,
            )
        self._costs.observe(rows + drafted, seconds)
        self._widest = max(self._widest, rows + drafted)
        each, time = emitted / rows, self.relative(rows, drafted / rows)
        self._rate.observe(each, time)
        self._rates[_load(rows)].observe(each, time)

    def choose(
        self, probabilities: Float[np.ndarray, "rows most"], chosen: bool = True
    ) -> Integer[np.ndarray, " rows"]:
        """How many tokens of each request's draft to verify.

        Args:
            probabilities: that a draft is right up to each token, so none is above the one before it; 0 where there
                is none.
            chosen: False: all that there are, whatever they cost.
        """
        rows, most = probabilities.shape
        available: np.ndarray = (probabilities > 0).sum(axis=1)
        if self.mode == ALL_OR_NOTHING and available.min(initial=most) < most:
            return np.zeros(rows, np.int64)
        if not chosen or not available.any():
            return available
        if self._costs is None:  # the first step shows what one without drafts costs
            return np.zeros(rows, np.int64)
        order = np.argsort(-probabilities, axis=None, kind="stable")[: available.sum()]
        counts = np.arange(len(order) + 1)
        widths, tokens = rows + counts, np.concatenate([[0.0], np.cumsum(probabilities.ravel()[order])])
        if self.mode == RAGGED:  # no wider than twice the widest step so far: what that costs is a guess
            sure = max(int(widths.searchsorted(FURTHER * self._widest, side="right")), 1)
            counts, widths, tokens = counts[:sure], widths[:sure], tokens[:sure]
        else:  # all, whose filling up costs the same, or none
            counts, widths, tokens = counts[[0, -1]], np.array([rows, rows * (1 + most)]), tokens[[0, -1]]
        plain, usual = float(self._seconds(rows)), self.rate(rows) * rows  # a plain step: its time, what that brings
        otherwise = usual * (self._seconds(widths) / plain - 1.0)
        gains = tokens - otherwise
        probed = self._costs.probe(widths.tolist(), gains.tolist(), usual / plain)
        if probed is None:
            best = int(np.where(gains >= 0, tokens - self.worth * otherwise, -np.inf).argmax())
        else:
            best = int(widths.searchsorted(probed))
        lengths: np.ndarray = np.bincount(order[: counts[best]] // most, minlength=rows)
        return lengths


def _load(rows: int) -> int:
    """The load that so many requests are: numbers within about a fifth of each other are one."""
    return round(2 * log2(rows))


def _guess(tokens: Any) -> Any:
    """Time of a step over so many tokens, as thought before any was seen, in steps over one."""
    return 1.0 + SLOPE * (tokens - 1.0)


def path_probabilities(found: Candidates, path: list[int], calibration: Calibration) -> list[float]:
    """P(right up to a node) for the nodes of a path: what their sources say, as far as they were right so far."""
    said, reached, probabilities = 1.0, 1.0, []
    for node in path:
        score, source = found.scores[node - 1], found.sources[node - 1]
        share = score / (said or 1.0)
        reached *= min(share * calibration.factor(source, bisect(CLASSES, share)), 1.0)
        probabilities.append(reached)
        said = score
    return probabilities


def learn(found: Candidates, path: list[int], ids: list[int], calibration: Calibration) -> None:
    """The outcome of a round, in which `ids` came: which candidates of the path were right, verified or not."""
    calibration.fade()
    said = 1.0
    for node, came in zip(path, ids, strict=False):
        score, right = found.scores[node - 1], found.tokens[node - 1] == came
        share = score / (said or 1.0)
        calibration.learn(found.sources[node - 1], bisect(CLASSES, share), right, share)
        if not right:
            return
        said = score
