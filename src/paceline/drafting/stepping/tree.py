"""EAGLE-2's dynamic tree (Li et al., 2024, section 4): grown where the head itself expects acceptance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from paceline.drafting.tree import TokenTree


class TreeCandidate(NamedTuple):
    logp: float  # of the whole path, by the head
    parent: int  # among the expanded nodes
    token: int


class DynamicTree:
    """One request's tree as it grows. Of every level the `width` likeliest nodes are expanded: drafted from together
    (section 4.1). In the end the likeliest of all candidates, whatever their level, are verified (section 4.2).

    Args:
        root: the request's last token.
        width: nodes of a level that are expanded.
        nodes: most nodes that are verified, root aside.

    Attributes:
        expanded: what was drafted from, level by level.
        newest: of it the last level, the likeliest first.
        origins: where the parents of these stand in the level before.
    """

    def __init__(self, root: int, width: int, nodes: int) -> None:
        self.expanded, self.newest = TokenTree.root(root), [0]
        self.origins = [0]
        self.width, self.nodes = width, nodes
        self._logp = [0.0]  # of the expanded nodes
        self._places: dict[tuple[int, int], int] = {}  # by parent and token
        self._level: list[TreeCandidate] = []
        self._best: list[TreeCandidate] = []

    def propose(self, tokens: Sequence[Sequence[int]], logps: Sequence[Sequence[float]]) -> None:
        """The likeliest tokens after each of the newest nodes, and their log-probabilities."""
        self._level = _sorted(
            TreeCandidate(self._logp[node] + min(logp, 0.0), node, token)  # no likelier than its parent by rounding
            for node, *rows in zip(self.newest, tokens, logps, strict=True)
            for token, logp in zip(*rows, strict=True)
        )
        self._best = _sorted([*self._best, *self._level])[: self.nodes]

    def descend(self, min_score: float = 0.0) -> bool:
        """Expand the best that were proposed. False, and nothing happens, where nothing after them could be among the
        best, or be as probable as `min_score`.
        """
        best = self._level[0].logp
        full = len(self._best) == self.nodes and best <= self._best[-1].logp
        if full or math.exp(best) < min_score:
            return False
        chosen = self._level[: self.width]
        self.origins = [candidate.parent - self.newest[0] for candidate in chosen]
        self.newest = [self._expand(candidate) for candidate in chosen]
        return True

    def tree(self, source: str) -> TokenTree:
        """What to verify, the likeliest first, with path probabilities for scores."""
        tree, places = TokenTree.root(self.expanded.tokens[0]), {0: 0}
        for candidate in self._best:
            node = tree.add(candidate.token, places[candidate.parent], source, score=math.exp(candidate.logp))
            if expanded := self._places.get(candidate[1:]):
                places[expanded] = node
        return tree

    def _expand(self, candidate: TreeCandidate) -> int:
        logp, parent, token = candidate
        self._logp.append(logp)
        self._places[parent, token] = node = self.expanded.add(token, parent, "")
        return node


def _sorted(candidates: Iterable[TreeCandidate]) -> list[TreeCandidate]:
    """The likeliest first; of equals, whoever was found first: parents before children."""
    return sorted(candidates, key=lambda candidate: -candidate.logp)
