"""How many tokens each request of a step drafts: those that bring more than their time does.

All requests of a step share its time, so they share one budget. Of all candidates the most probable N are verified,
where N maximises the tokens expected less what the time for them brings in the long run: the rule of
`drafting.budget` and `policies.long_run`, for a whole batch. What a step costs is measured from outside, as the time
between two proposals, for each number of requests by the tokens that it verified.
"""

from __future__ import annotations

from bisect import bisect
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Integer

from paceline.drafting.budget import CLASSES, Calibration
from paceline.integrations.vllm.settings import ALL_OR_NOTHING, PAD, RAGGED
from paceline.policies.long_run import FADING, START
from paceline.targets.cost_model import LearnedCosts

if TYPE_CHECKING:
    from paceline.drafting.lookup import Candidates

STEPS = 4  # costs are told apart by quarters of a token a request
SLOPE = 0.03  # of a plain step's time, that a token more of each request is thought to cost before any was seen


class StepCosts:
    """Seconds of a step with about so many requests, by the tokens that each verifies on average.

    Args:
        most: tokens that a request drafts at most.
        plain: seconds of a step that drafts nothing, as first seen.
    """

    def __init__(self, most: int, plain: float) -> None:
        widths = [1.0, 1.25, 1.5, *(2.0 + step for step in range(4)), *(2.0**n for n in range(3, 8))]
        last = max(1.0 + most, 2.0)
        self._widths = np.array([*(width for width in widths if width < last), last])
        self._costs = LearnedCosts({_place(w): plain * (1 + SLOPE * (w - 1)) for w in self._widths})
        self._tokens = self._time = 0.0  # of a request, fading; the time in plain steps
        self._fit()

    def relative(self, width: float) -> float:
        """A step's time in steps without drafts."""
        return float(np.interp(width, self._widths, self._seconds) / self._seconds[0])

    def relatives(self, widths: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """`relative` of each."""
        found: np.ndarray = np.interp(widths, self._widths, self._seconds) / self._seconds[0]
        return found

    @property
    def rate(self) -> float:
        """Tokens that a request gets in the time of a plain step, in the long run: rho of `policies.long_run`."""
        return (START + self._tokens) / (START + self._time)

    def observe(self, width: float, emitted: float, seconds: float) -> None:
        """A step has taken so long, and brought so many tokens for each request."""
        self._costs.observe(_place(width), seconds)
        self._fit()
        self._tokens = self._tokens * FADING + emitted
        self._time = self._time * FADING + self.relative(width)

    def probe(self, widths: Float[np.ndarray, " n"]) -> int | None:
        """The number of that width which this step should have for the sake of knowing; mostly none."""
        places = np.maximum(np.rint(STEPS * widths), STEPS).astype(int).tolist()
        probed = self._costs.probe(places)
        return None if probed is None else places.index(probed)

    def _fit(self) -> None:
        self._seconds = np.array([self._costs(_place(width)) for width in self._widths])


def _place(width: float) -> int:
    return max(round(STEPS * float(width)), STEPS)


class Lengths:
    """Chooses how far the requests of each step draft.

    Args:
        most: tokens that a request drafts at most.
        mode: of `VLLMSettings`.
    """

    def __init__(self, most: int, mode: str) -> None:
        self.most, self.mode = most, mode
        self._known: dict[int, StepCosts] = {}  # by bits of the number of requests

    def costs(self, rows: int) -> StepCosts | None:
        """What steps with about so many requests cost; None: there was none yet."""
        return self._known.get(rows.bit_length())

    def relative(self, rows: int, drafted: int) -> float:
        """What a step costs in which each request drafts so many, in plain steps."""
        costs = self.costs(rows)
        return costs.relative(1.0 + drafted) if costs else 1.0 + SLOPE * drafted

    def observe(self, rows: int, drafted: int, emitted: int, seconds: float) -> None:
        """The outcome of a step.

        Args:
            drafted: tokens that it verified beside each request's last.
            emitted: tokens that came of it.
        """
        costs = self.costs(rows)
        if costs is None:
            if drafted:
                return
            self._known[rows.bit_length()] = costs = StepCosts(self.most, seconds)
        costs.observe(1.0 + drafted / rows, emitted / rows, seconds)

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
        costs = self.costs(rows)
        if costs is None:  # the first step shows what one without drafts costs
            return np.zeros(rows, np.int64)
        order = np.argsort(-probabilities, axis=None, kind="stable")[: available.sum()]
        tokens = np.concatenate([[0.0], np.cumsum(probabilities.ravel()[order])])
        counts = np.arange(len(tokens)) if self.mode == RAGGED else np.where(np.arange(len(tokens)) > 0, rows * most, 0)
        widths = 1.0 + counts / rows
        gains = tokens - costs.rate * rows * (costs.relatives(widths) - 1.0)
        if self.mode == ALL_OR_NOTHING or self.mode == PAD:  # what is filled up costs the same
            best = len(tokens) - 1 if gains[-1] > 0 else 0
        else:
            best = int(gains.argmax())
        probed = costs.probe(widths)
        best = best if probed is None else probed
        lengths: np.ndarray = np.bincount(order[:best] // most, minlength=rows)
        return lengths


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
