"""Whether a batch drafts at all in a round, or decodes plainly, for which nothing has to be asked."""

from __future__ import annotations

from random import Random

from paceline.drafting.gate import Gate
from paceline.drafting.stopwatch import Stopwatch

FIRST = 32  # rounds that say too little: drafters are not trusted much before they are known
MUCH = 0.3  # tokens; a round that brings so many is followed by another
LITTLE = 0.015  # tokens that plain decoding brings in the time for drafting: where less, a pause takes long to begin,
LEAST = 0.004  # and where less than this, there is none
FADING = 0.5 ** (1 / 40)  # texts change: what drafts were worth counts half after so many rounds,
LASTING = 0.5 ** (1 / 300)  # or after so many where a pause saves little
ALIKE = 6.0  # rounds whose outcome weighs as much as what these show
HOPEFUL = 0.5 ** (1 / 8)  # during a pause drafting is soon thought to take little


class Pause:
    """Drafting takes time before anything is known of a round's candidates. Where they are mostly worth less than that,
    no choice among them makes it good: the batch had better not look for any. It does so again some rounds later. After
    a round that brought much it always does: good rounds come together. Where drafting takes little, a pause begins
    only after drafts have been worth nothing for long.

    What drafts are worth, and the time for them, depend on how many requests share the pass, and on whether any of them
    samples: each power of two is judged by itself, with and without.
    """

    def __init__(self) -> None:
        self._random = Random(0)
        self._known: dict[tuple[int, bool], _Known] = {}

    def pauses(self, rows: int, sampling: bool = False) -> bool:
        """Whether so many requests had better not draft in this round."""
        known = self._known.get((rows.bit_length(), sampling))
        if known is None or known.rounds < FIRST or known.paid or known.lost < LEAST:
            return False
        belief = known.lately if known.lost >= LITTLE else known.lasting
        if belief.asks(0.0, known.rate * known.stopwatch.seconds, self._random):
            return False
        known.stopwatch.idle()
        return True

    def learn(self, rows: int, gain: float, rate: float, seconds: float, sampling: bool = False) -> None:
        """They drafted.

        Args:
            gain: tokens that the round is expected to bring because of it, less those that the longer pass would.
            rate: tokens a second that time brings otherwise.
            seconds: that drafting took.
        """
        known = self._known.get((rows.bit_length(), sampling))
        if known is None:
            known = self._known[rows.bit_length(), sampling] = _Known()
        known.lately.learn(0.0, gain)
        known.stopwatch.learn(seconds)
        known.rate, known.rounds, known.paid = rate, known.rounds + 1, gain > MUCH
        known.lost = rate * known.stopwatch.seconds


class _Known:
    """Of so many requests of a kind."""

    def __init__(self) -> None:
        self.lasting, self.stopwatch = Gate(fading=LASTING), Stopwatch(HOPEFUL)
        self.lately = Gate(self.lasting, FADING, alike=ALIKE)
        self.rate, self.rounds, self.paid, self.lost = 0.0, 0, False, 0.0
