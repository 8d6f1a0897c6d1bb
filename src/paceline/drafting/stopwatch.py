"""What something takes that is done again and again, as asking a source of drafts."""

from __future__ import annotations

from math import pow

FIRST = 5  # times in which it may come down at once: the very first is slow for its own reasons
STEP = 1.1  # the factor by which one round may change what asking is thought to take
HOPEFUL = 0.5 ** (1 / 200)
LONG = 50  # rounds without asking


class Stopwatch:
    """What asking a source takes: near the median of what was measured lately, so that other programs' bursts count for
    little. The longer ago it was asked, the less it is thought to take: it is asked again some time, and what is seen
    then counts the more.

    Args:
        hopeful: each round without asking, it is thought to take so much less.
        patient: the more often it was asked in vain, the longer that takes; for what takes long.
    """

    def __init__(self, hopeful: float = HOPEFUL, patient: bool = False) -> None:
        self._seconds, self._idle, self._asked, self._hopeful = 0.0, 0, 0, hopeful
        self._patient = patient
        self._in_vain = 0  # times that it was asked after a long while, and not in the next round

    @property
    def seconds(self) -> float:
        return self._seconds * pow(self._hopeful, self._idle / (1 + self._in_vain))

    def idle(self) -> None:
        """It was not asked this round."""
        self._idle += 1

    def learn(self, seconds: float) -> None:
        """Asking took so long this round."""
        self._asked += 1
        if self._idle >= LONG:
            self._in_vain += self._patient
        elif not self._idle:
            self._in_vain = 0
        if self._seconds:
            most = STEP ** (1 + min(self._idle, 100))
            least = 0.0 if self._asked <= FIRST else self._seconds / most
            seconds = min(max(seconds, least), self._seconds * most)
        self._seconds, self._idle = seconds, 0
