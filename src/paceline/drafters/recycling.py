"""Token Recycling (Luo et al., 2024): the target's own runner-up tokens, kept in an adjacency matrix, grow the tree."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from paceline.drafters.base import Drafter, Row
from paceline.drafters.tree import TokenTree
from paceline.registry import require
from paceline.targets.target import PassOutput, Target


class Recycling(Drafter):
    """Each pass leaves, for every token it read, the `top` tokens the target thought likely to follow; the next tree is
    grown from the root by following these rows.

    The paper verifies one static tree of 80 nodes, made for a GPU. Here the tree has `nodes` nodes, grown best first,
    the successor of rank r taken to follow with probability `(1 - decay) * decay ** r`.

    Args:
        nodes: size of the tree.
        top: successors kept a token (the paper's k = 8).
        decay: how much less likely each next rank is than the one before.
    """

    default_policy = "fixed:k=6"  # the depth of the paper's tree
    source = "recycling"

    def __init__(self, target: Target, *, nodes: int = 12, top: int = 8, decay: float = 0.4) -> None:
        super().__init__(target)
        require(nodes >= 1 and top >= 1, f"recycling: nodes and top must be >= 1, not {nodes} and {top}")
        require(0 < decay < 1, f"recycling: decay must lie in (0, 1), not {decay}")
        self.nodes, self.top, self.decay = nodes, top, decay

    def max_nodes(self, depth: int) -> int:
        return self.nodes

    def begin(self, row: Row, hidden: object) -> None:
        row.state = {}  # token -> its successors, most likely first

    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        return [self._grow(row) for row in rows]

    def _grow(self, row: Row) -> TokenTree:
        tree = TokenTree.root(row.ids[-1])
        candidates: list[tuple[float, int, int, int]] = []  # (-score, order, parent, token)
        self._expand(row, tree, 0, 1.0, candidates)
        while candidates and tree.drafted < self.nodes:
            score, _, parent, token = heapq.heappop(candidates)
            self._expand(row, tree, tree.add(token, parent, self.source), -score, candidates)
        return tree

    def _expand(
        self, row: Row, tree: TokenTree, node: int, score: float, candidates: list[tuple[float, int, int, int]]
    ) -> None:
        depth = tree.depths[node]
        if depth < row.room and row.policy.more(depth) and row.policy.keep(None, depth):
            for rank, token in enumerate(row.state.get(tree.tokens[node], ())):
                weight = (1 - self.decay) * self.decay**rank
                heapq.heappush(candidates, (-score * weight, len(candidates), node, token))

    def observe(self, row: Row, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        successors = out.logits.topk(min(self.top, out.logits.shape[-1])).indices.tolist()
        row.state.update(zip(tree.tokens, successors, strict=True))
