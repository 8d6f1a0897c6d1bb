"""Predicted outputs: the client says what the output will largely be, and that is drafted wherever it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.drafting.base import Row
from paceline.drafting.lookup import likely
from paceline.drafting.tree import TokenTree
from paceline.drafting.tree_drafter import TreeDrafter
from paceline.registry import AUTO
from paceline.targets.target import Target

LONGEST = 4  # n-gram by which the output finds its place again
NEAR = 16  # tokens: a match of one token alone counts only so far after the place that was lost
TRUST = 3  # matched tokens that a prediction counts as before the first: it says how the output begins


class Alignment:
    """Where in a prediction the output stands. An edit loses the place; the latest tokens find it again.

    Attributes:
        at: index of the prediction's token that should come next; None: the place is lost.
        matched: how many tokens in a row were as predicted.
        followed: how many of the output's tokens were as predicted.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self.prediction = list(prediction)
        self.at: int | None = 0
        self.matched, self.followed = TRUST, 0
        self._lost = 0  # where the place was lost
        self._latest: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}
        for n in range(1, LONGEST + 1):
            for end in range(n, len(prediction) + 1):
                self._ends.setdefault(tuple(prediction[end - n : end]), []).append(end)

    def append(self, token: int) -> None:
        """The output goes on with this token."""
        self._latest = [*self._latest[1 - LONGEST :], token]
        if self.at is not None and self.prediction[self.at : self.at + 1] == [token]:
            self.at, self.matched, self.followed = self.at + 1, self.matched + 1, self.followed + 1
            return
        if self.at is not None:
            self._lost = self.at
        self.at, self.matched = self._find()
        self.followed += self.at is not None

    def next(self, count: int) -> list[int]:
        """What should come next, at most `count` tokens."""
        return [] if self.at is None else self.prediction[self.at : self.at + count]

    def _find(self) -> tuple[int | None, int]:
        """The nearest place after the longest n-gram of the latest tokens, and its length."""
        for n in range(len(self._latest), 0, -1):
            ends = self._ends.get(tuple(self._latest[-n:]), [])
            if n == 1:
                ends = [end for end in ends if 0 <= end - self._lost <= NEAR]
            if ends:
                return min(ends, key=lambda end: (end < self._lost, abs(end - self._lost))), n
        return None, 0


@dataclass
class Progress:
    """How much of a request's tokens its alignment has seen: all of the prompt counts as seen."""

    alignment: Alignment
    seen: int

    def follow(self, ids: list[int]) -> Alignment:
        new = ids[self.seen :]  # another thread may append more meanwhile
        for token in new:
            self.alignment.append(token)
        self.seen += len(new)
        return self.alignment


class Prediction(TreeDrafter):
    """Drafts a request's `prediction` from where the output stands in it."""

    source = "prediction"

    def __init__(self, target: Target) -> None:
        super().__init__(target, AUTO)

    def max_nodes(self, depth: int) -> int:
        return min(depth, self.max_candidates)

    def remember(self, row: Row) -> Progress:
        return Progress(Alignment(row.prediction), len(row.ids))

    def propose(self, row: Row, memory: Progress, depth: int, min_score: float) -> TokenTree:
        tree, node, score = TokenTree.root(row.ids[-1]), 0, 1.0
        alignment = memory.follow(row.ids)
        for count, token in enumerate(alignment.next(min(depth, self.max_candidates)), start=alignment.matched):
            score *= likely(count)
            if score < min_score:
                break
            node = tree.add(token, node, self.source, score=score)
        return tree
