"""Seconds of a target pass by its width: as given, or learned from measurements and from the passes that are run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple, Self

import numpy as np
from jaxtyping import Float

from paceline.errors import require

TABLE = 128  # widths that are looked up

# Standard deviations, in logarithms: what is believed of costs before anything is measured, beside a straight line.
SPEED, LEAN, BEND = 1.0, 0.7, 0.3  # of all together, of the slope, of what neighbours share
OCTAVES = 1.5  # widths that far apart, in factors of two, still share most of their bend
MEASURED, NOISE = 0.25, 0.1  # of a width's first measurement, of a pass that is run
DOUBLED = 1000  # tokens in the cache that may, for all that is known, double a pass's time, or a token's share of it
UNSURE = 0.5  # standard deviation of what is given as added by contexts, as a part of it
SLOWER, FASTER = 2.0, 4.0  # the most standard deviations that a pass counts for: noise only ever adds

LEARNED_FROM = ((64, 1), (256, 4), (np.inf, 16))  # up to so many passes each so many-th: learning takes time, too
FIRST_PROBE = 8  # passes after which one is run for the sake of knowing; then after twice as many each time

_WIDTHS = np.arange(TABLE + 1, dtype=float)


class Changes(NamedTuple):
    """How costs are thought to differ from neighbour to neighbour, and to change: standard deviations, in logarithms.

    Attributes:
        step: of one width beside those next to it.
        speed: of the machine, from one pass that is learned from to the next.
        width: of a width's own cost, likewise.
    """

    step: float
    speed: float
    width: float


PASSES = Changes(step=0.1, speed=0.03, width=0.003)  # of a target's passes


class Costs:
    """T(k), seconds of a target pass over k new tokens, or of a round that drafts k.

    With n tokens in the cache that is base(k) + (n - context) x (read + k x score): `read` is for a row, whose keys
    and values are read once, `score` for a new token. What is given as more than a wider pass is noise, which only ever
    adds. Between widths and beyond the last one, base is a straight line.

    Args:
        passes: seconds by width, of two widths or more.
        context: n of these passes.
        read, score: seconds for each further token in the cache: of a row, and of a new token.

    Attributes:
        between: seconds from the end of a round to the next, in which its tokens are put to use. They belong to a
            round's time, but not to what a wider pass costs.

    Raises:
        OptionError: fewer than two widths, or costs that are not above 0.
    """

    between = 0.0

    def __init__(
        self, passes: Mapping[int, float], *, context: float = 0.0, read: float = 0.0, score: float = 0.0
    ) -> None:
        widths = sorted(passes)
        require(len(widths) > 1, "costs need at least two widths")
        require(all(0 < seconds < np.inf for seconds in passes.values()), "costs must be above 0")
        self.widths = np.array(widths, float)
        self.context, self.read, self.score = context, max(read, 0.0), max(score, 0.0)
        self._set(np.array([passes[width] for width in widths]))

    def __call__(self, width: int, slots: float | None = None, rows: int = 1) -> float:
        """T(width, slots).

        Args:
            width: new tokens of all rows.
            slots: tokens that each row has in the cache, on average; None: as many as where it was measured.
        """
        beyond = width - TABLE
        seconds = self._table[width] if beyond <= 0 else self._table[-1] + beyond * self._last_slope
        return max(seconds + self._further(width, slots, rows), self._least)

    def series(self, widths: Sequence[int], slots: float | None = None, rows: int = 1) -> list[float]:
        """T of several widths at once, with arguments as above."""
        if widths[-1] > TABLE:
            return [self(width, slots, rows) for width in widths]
        table, least, further = self._table, self._least, self._beyond(slots)
        row, token = further * rows * self.read, further * self.score
        return [max(table[width] + row + width * token, least) for width in widths]

    def anew(self) -> Self:
        """These as a first opinion of others."""
        passes = dict(zip(map(int, self.widths), self.base.tolist(), strict=True))
        return type(self)(passes, context=self.context, read=self.read, score=self.score)

    def observe(self, width: int, seconds: float, slots: float | None = None, rows: int = 1) -> None:
        """A pass was run, and took so long. Given costs stay as they are."""

    def probe(self, widths: Sequence[int], gains: Sequence[float] = (), rate: float = 0.0) -> int | None:
        """Which of these widths the next pass should have for the sake of knowing; mostly none.

        Args:
            gains: tokens that a pass of each is expected to bring, less those that its time would bring otherwise. One
                that cannot well be the best is not worth a pass. Without them all may be.
            rate: these, a second.
        """
        return None

    def _further(self, width: int, slots: float | None, rows: int) -> float:
        return self._beyond(slots) * (rows * self.read + width * self.score)

    def _beyond(self, slots: float | None) -> float:
        """Tokens in the cache beyond those of the passes that are given."""
        return 0.0 if slots is None else slots - self.context

    def _set(self, seconds: Float[np.ndarray, " widths"]) -> None:
        #: Seconds at `widths`.
        self.base = base = np.minimum.accumulate(seconds[::-1])[::-1]
        rises = (base[1:] - base[0]) / (self.widths[1:] - self.widths[0])
        #: Seconds that one more token costs at least, on average up to the width where that is least.
        self.slope = float(rises.min())
        self._least = 0.1 * float(base[0])
        self._last_slope = float((base[-1] - base[-2]) / (self.widths[-1] - self.widths[-2]))
        beyond = np.maximum(_WIDTHS - self.widths[-1], 0.0)
        self._table: list[float] = (np.interp(_WIDTHS, self.widths, base) + beyond * self._last_slope).tolist()


class LearnedCosts(Costs):
    """Costs that take what was measured for a first opinion, and learn from the passes that are run anyway.

    log base at the widths, `read` and `score` are a Gaussian vector, updated by each pass (a Kalman filter, of a model
    that is straight near what is believed). Before anything was measured log base is that of a straight line in k, of
    unknown speed and slope, with bends that neighbouring widths share and small steps of each width's own. So a width
    that was measured while another program ran is put right by its neighbours, and one program's burst moves the speed
    of all rather than the width it happened to hit. A pass that took far longer than expected counts as if it had taken
    a little longer.

    Args:
        measured: standard deviation of what is given, in logarithms: greater where it is a guess.
        changes: what is believed of them.
        learned_from: up to so many passes each so many-th is learned from.
    """

    def __init__(
        self,
        passes: Mapping[int, float],
        *,
        context: float = 0.0,
        read: float = 0.0,
        score: float = 0.0,
        measured: float = MEASURED,
        changes: Changes = PASSES,
        learned_from: Sequence[tuple[float, int]] = LEARNED_FROM,
    ) -> None:
        super().__init__(passes, context=context, read=read, score=score)
        line = _line(self.widths, self.base)
        octaves = np.log2(1.0 + self.widths)
        apart = (octaves[:, None] - octaves) / OCTAVES
        shared, own = np.exp(-0.5 * apart**2), np.eye(len(octaves))
        lean = octaves - octaves[0]
        prior = (
            SPEED**2
            + LEAN**2 * np.outer(lean, lean) / max(lean[-1], 1.0) ** 2
            + BEND**2 * shared
            + changes.step**2 * own
        )
        gain = np.linalg.solve(prior + measured**2 * own, prior).T
        further = np.array([self.read, self.score])
        doubling = np.array([self.base[0], self.slope]) / DOUBLED
        unsure = UNSURE * further + doubling
        self._mean = np.concatenate([np.log(line) + gain @ np.log(self.base / line), further])
        self._covariance = _block(prior - gain @ prior, unsure**2)
        self._change = _block(changes.speed**2 + changes.width**2 * (shared + own), (changes.width * unsure) ** 2)
        self._learned_from = learned_from
        self._observed, self._next_probe = 0, FIRST_PROBE  # passes
        self._probed: int | None = None  # a width that is being tried
        self._believe()

    @classmethod
    def fitted(cls, passes: Mapping[int, Mapping[int, float]]) -> LearnedCosts:
        """Of seconds by context and width. All widths of the first context count; of the others those that it has too,
        for a fit of `read` and `score` by least squares.
        """
        (context, first), *others = passes.items()
        rows = [
            (n - context, width, seconds - first[width])
            for n, found in others
            for width, seconds in found.items()
            if width in first
        ]
        read = score = 0.0
        if rows:
            further = np.array([(n, n * width) for n, width, _ in rows], float)
            read, score = np.linalg.lstsq(further, np.array([more for *_, more in rows]), rcond=None)[0].tolist()
        return cls(first, context=context, read=read, score=score)

    def observe(self, width: int, seconds: float, slots: float | None = None, rows: int = 1) -> None:
        self._observed += 1
        since = next(each for most, each in self._learned_from if self._observed <= most)
        tried, self._probed = width == self._probed, None
        if (widest := int(self.widths[-1])) < width:  # what the straight line from there on says of the last width
            width, seconds = widest, seconds * self(widest, slots, rows) / self(width, slots, rows)
        if seconds > 0 and (tried or self._observed % since == 0):
            self._learn(width, seconds, self._beyond(slots) * np.array([rows, width]), since)

    def _learn(self, width: int, seconds: float, further: Float[np.ndarray, " 2"], since: int) -> None:
        """Take in a pass, for which `read` and `score` count so many times."""
        at = self._between(width)
        base = float(np.exp(at @ self._mean[:-2]))
        expected = max(base + float(further @ self._mean[-2:]), self._least)
        told_by = np.concatenate([at * base, further]) / expected
        self._covariance += since * self._change
        covariance = self._covariance @ told_by
        variance = float(told_by @ covariance) + NOISE**2
        surprise = float(np.log(seconds / expected)) / variance**0.5
        surprise = min(max(surprise, -FASTER), SLOWER) * variance**0.5
        self._mean += covariance * (surprise / variance)
        self._mean[-2:] = np.maximum(self._mean[-2:], 0.0)
        self._covariance -= np.outer(covariance, covariance) / variance
        self._believe()

    def _believe(self) -> None:
        self._set(np.exp(self._mean[:-2]))
        self.read, self.score = self._mean[-2:].tolist()

    def probe(self, widths: Sequence[int], gains: Sequence[float] = (), rate: float = 0.0) -> int | None:
        if self._observed < self._next_probe or len(widths) < 2:
            return None
        self._next_probe = 2 * self._observed
        best, doubted = max(gains, default=0.0), []
        for width, gain in zip(widths, gains or [0.0] * len(widths), strict=True):
            at = self._between(width)
            doubt = float(at @ self._covariance[:-2, :-2] @ at) ** 0.5
            if gain + rate * float(at @ self.base) * doubt >= best:  # were it faster than thought
                doubted.append((doubt, width))
        self._probed = max(doubted, key=itemgetter(0))[1]
        return self._probed

    def _between(self, width: int) -> Float[np.ndarray, " widths"]:
        """The shares of the two widths that this one lies between."""
        at = np.zeros(len(self.widths))
        high = min(max(int(np.searchsorted(self.widths, width)), 1), len(at) - 1)
        share = (width - self.widths[high - 1]) / (self.widths[high] - self.widths[high - 1])
        at[high] = min(max(share, 0.0), 1.0)
        at[high - 1] = 1.0 - at[high]
        return at


def _block(of_widths: Float[np.ndarray, "widths widths"], of_contexts: Float[np.ndarray, " 2"]) -> np.ndarray:
    """The covariance of numbers that have nothing to do with each other."""
    size = len(of_widths)
    found = np.zeros((size + 2, size + 2))
    found[:size, :size], found[size:, size:] = of_widths, np.diag(of_contexts)
    return found


def _line(widths: Float[np.ndarray, " widths"], seconds: Float[np.ndarray, " widths"]) -> Float[np.ndarray, " widths"]:
    """The straight line a + b k with a, b > 0 that is nearest, in relative terms."""
    least = 1e-3 * float(seconds.min())
    sides = np.stack([1 / seconds, widths / seconds], axis=1)
    a, b = np.linalg.lstsq(sides, np.ones(len(widths)), rcond=None)[0].tolist()
    if a <= least:
        a, b = least, 1 / float(np.mean((widths + 1) / seconds))
    return np.asarray(a + max(b, 0.0) * widths)
