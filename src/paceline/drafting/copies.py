"""What a request's own text says next, for drafters that pay for each token: where the text repeats itself, a copy is
right more often than they are, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import NamedTuple

from paceline.drafting.ngram_index import NgramIndex
from paceline.policies.sureness import Sureness

LONGEST = 6  # tokens of a match that are looked at
#: How often what followed the last 1, 2, … tokens when they stood in the text before follows again, to begin with.
CHANCES = (0.2, 0.55, 0.68, 0.72, 0.8, 0.88)
WEIGHT, FADING = 8.0, 0.98  # as of so many tokens seen; each of which counts so much less than the next


class Copy(NamedTuple):
    """A token to copy."""

    token: int
    chance: float  # that it is what follows

    @property
    def sureness(self) -> Sureness:
        """As of a draft distribution over this token and one other."""
        p = min(max(self.chance, 1e-6), 1 - 1e-6)
        return Sureness(p, -p * log(p) - (1 - p) * log(1 - p))


class Copies:
    """Finds the latest earlier occurrence of a text's last tokens, and learns how often copying from there is right.

    What it learns is of the output alone: prompts repeat themselves more, or less.

    Args:
        ids: the prompt.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self._index = NgramIndex(LONGEST, keep=1)
        self._index.extend(ids)
        self._known = len(ids)
        self._right, self._seen = [WEIGHT * chance for chance in CHANCES], [WEIGHT] * LONGEST

    def read(self, ids: list[int]) -> None:
        """Learn of what has come to the text."""
        for at in range(self._known, len(ids)):
            matched, end = self._match(ids[max(0, at - LONGEST - 1) : at])
            if matched:
                self._right[matched - 1] = FADING * self._right[matched - 1] + (ids[end] == ids[at])
                self._seen[matched - 1] = FADING * self._seen[matched - 1] + 1
        self._known = len(ids)
        self._index.extend(ids)

    def after(self, ids: list[int], drafted: Sequence[int]) -> Copy | None:
        """What may follow the text and what is drafted after it; None: its end never stood there before.

        Args:
            ids: the text, which has been read.
        """
        matched, end = self._match([*ids[-LONGEST - 1 :], *drafted][-LONGEST - 1 :])
        return Copy(ids[end], self._right[matched - 1] / self._seen[matched - 1]) if matched else None

    def _match(self, last: list[int]) -> tuple[int, int]:
        """How many of the last tokens stood in the text before, and where they ended then."""
        matched, ends = self._index.matches(last, 1)
        return matched, ends[0] if ends else 0
