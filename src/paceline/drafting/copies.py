"""What a request's own text says next, for drafters that pay for each token: where the text repeats itself, a copy is
often likelier to be right than their own token, and takes no forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, log
from typing import NamedTuple

from paceline.drafting.ngram_index import NgramIndex
from paceline.policies.online import OnlineLogistic, log_odds
from paceline.policies.sureness import Sureness

LONGEST = 6  # tokens of a match that are looked at
#: How often what followed the last 1, 2, … tokens when they stood in the text before follows again, to begin with.
CHANCES = (0.21, 0.47, 0.63, 0.68, 0.73, 0.86)
WEIGHT, FADING = 8.0, 0.98  # as of so many tokens seen; each of which counts so much less than the next
AT_FACE_VALUE = (0.0, 1.0)  # how likely a drafter's own token is, of 1 and the log odds it gives: weights at the start,
VARIANCE, DOUBT = 0.2, 1e-4  # of a weight then, and what each outcome adds: texts change


class Copy(NamedTuple):
    """A token to copy."""

    token: int
    chance: float  # that it is what follows

    @property
    def sureness(self) -> Sureness:
        """As of a draft distribution over this token and one other."""
        p = min(max(self.chance, 1e-6), 1 - 1e-6)
        return Sureness(p, -p * log(p) - (1 - p) * log(1 - p))


class Rates:
    """How often copies turn out right, by the length of their match, and a drafter's own tokens, by how likely it says
    its likeliest is.
    """

    def __init__(self) -> None:
        self._right, self._seen = [WEIGHT * chance for chance in CHANCES], [WEIGHT] * LONGEST
        self._own = OnlineLogistic(AT_FACE_VALUE, VARIANCE)

    def of_copy(self, matched: int) -> float:
        """That a copy is right after so many tokens that match, from 1."""
        return self._right[matched - 1] / self._seen[matched - 1]

    def of_own(self, top: float) -> float:
        """That the drafter's own token is."""
        return self._own.probability((1.0, log_odds(top)))

    def copied(self, matched: int, right: bool) -> None:
        self._right[matched - 1] = FADING * self._right[matched - 1] + right
        self._seen[matched - 1] = FADING * self._seen[matched - 1] + 1

    def drafted(self, top: float, right: bool) -> None:
        if not isfinite(top):  # of a head that gives no numbers there is nothing to learn
            return
        self._own.doubt(DOUBT)
        self._own.learn((1.0, log_odds(top)), float(right))


class Copies:
    """Finds the latest earlier occurrence of a text's last tokens, and learns how often copying from there is right: in
    the output alone, as prompts repeat themselves more, or less.

    Args:
        ids: the prompt.
        rates: what is known of copies so far, and learned.
    """

    def __init__(self, ids: Sequence[int], rates: Rates) -> None:
        self.rates = rates
        self._index = NgramIndex(LONGEST)
        self._index.extend(ids)
        self._known = len(ids)
        self._drafted: list[tuple[int, int, float]] = []  # in the last round: see `drafted`

    def read(self, ids: list[int]) -> None:
        """Learn of what has come to the text."""
        for at in range(self._known, len(ids)):
            matched, ends = self._index.matches(ids[max(0, at - LONGEST - 1) : at])
            if matched:
                self.rates.copied(matched, ids[ends[0]] == ids[at])
        for at, token, top in self._drafted:
            right = at < len(ids) and ids[at] == token
            if at < len(ids):
                self.rates.drafted(top, right)
            if not right:
                break
        self._drafted.clear()
        self._index.extend(ids)
        self._known = len(ids)

    def drafted(self, at: int, token: int, top: float) -> None:
        """A token of the drafter's own was drafted for this place of the text, where its likeliest had probability
        `top`.
        """
        self._drafted.append((at, token, top))

    def after(self, ids: list[int], drafted: Sequence[int]) -> Copy | None:
        """What may follow the text and what is drafted after it; None: its end never stood there before.

        Args:
            ids: the text, which has been read.
        """
        matched, ends = self._index.matches([*ids[-LONGEST - 1 :], *drafted])
        return Copy(ids[ends[0]], self.rates.of_copy(matched)) if matched else None
