"""A tree of the drafter's likeliest continuations, one level after the other (EESD, section 5.7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.drafting.tree import TokenTree


class BeamCandidate(NamedTuple):
    score: float  # log-probability of the whole path
    parent: int
    token: int


class Beam:
    """One request's tree as it grows. Of every level the `width` likeliest nodes are drafted from; of all other
    candidates the likeliest become leaves. So the nodes that are drafted from come first in the tree, level by level.

    Args:
        root: the request's last token.
        width: nodes of a level that are drafted from.
        nodes: most nodes of the tree, root aside.
    """

    def __init__(self, root: int, width: int, nodes: int, source: str) -> None:
        self.tree = TokenTree.root(root)
        self.width, self.nodes, self.source = width, nodes, source
        self.newest = [0]  # the nodes to draft from, the likeliest first
        self._scores = [0.0]
        self._level: list[BeamCandidate] = []
        self._spare: list[BeamCandidate] = []

    def propose(self, tokens: Sequence[Sequence[int]], scores: Sequence[Sequence[float]]) -> None:
        """The likeliest tokens after each of the newest nodes, and their log-probabilities."""
        self._level = sorted(
            (
                BeamCandidate(self._scores[node] + score, node, token)
                for node, *rows in zip(self.newest, tokens, scores, strict=True)
                for token, score in zip(*rows, strict=True)
            ),
            reverse=True,
        )

    @property
    def has_room(self) -> bool:
        """For another level to draft from."""
        return self.tree.drafted + self.width <= self.nodes

    def descend(self) -> None:
        """Draft from the best that were proposed."""
        self.newest = [self._add(candidate) for candidate in self._level[: self.width]]
        self._spare += self._level[self.width :]
        self._level = []

    def finish(self) -> None:
        """No further level: what is likeliest of all that is left becomes leaves."""
        left = sorted(self._level + self._spare, reverse=True)
        for candidate in left[: self.nodes - self.tree.drafted]:
            self._add(candidate)

    def _add(self, candidate: BeamCandidate) -> int:
        self._scores.append(candidate.score)
        return self.tree.add(candidate.token, candidate.parent, self.source)
