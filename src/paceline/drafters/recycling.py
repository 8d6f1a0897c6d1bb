"""Token Recycling (Luo et al., 2024): the target's own runner-up tokens, kept in an adjacency matrix, grow the tree."""

from __future__ import annotations

import heapq

from paceline.drafting.base import Row
from paceline.drafting.shared_texts import PROCESS, REQUEST, SHARES
from paceline.drafting.tree import TokenTree
from paceline.drafting.tree_drafter import TreeDrafter
from paceline.errors import require
from paceline.registry import AUTO
from paceline.targets.target import PassOutput, Target

#: Of each token its successors, most likely first.
Adjacency = dict[int, list[int]]


class Recycling(TreeDrafter):
    """Each pass leaves, for every token it read, the `top` tokens the target thought likely to follow; the next tree is
    grown from the root by following these rows.

    The paper verifies one static tree of 80 nodes, made for a GPU. Here the tree is grown best first to any size, the
    successor of rank r taken to follow with probability `(1 - decay) * decay ** r`.

    Args:
        budget: most nodes of the tree; "auto": as many as pay on this machine.
        top: successors kept a token (the paper's k = 8).
        decay: how likely each next rank is, relative to the one before.
        share: "process": all requests fill and follow one matrix, of at most a row for each token of the vocabulary.
            The speed of one request then tells about the text of others. "request": each starts with none.
    """

    default_policy = "fixed:k=6"  # the depth of the paper's tree
    source = "recycling"
    reads_logits = True
    learning_pauses = True  # the largest of all logits take longer to find than a draft

    def __init__(
        self, target: Target, *, budget: int | str = AUTO, top: int = 8, decay: float = 0.4, share: str = REQUEST
    ) -> None:
        super().__init__(target, budget)
        require(share in SHARES, f"recycling: share is {' or '.join(SHARES)}, not '{share}'")
        require(top >= 1, f"recycling: top must be >= 1, not {top}")
        require(0 < decay < 1, f"recycling: decay must lie in (0, 1), not {decay}")
        self.top, self.decay = top, decay
        self.shared: Adjacency | None = {} if share == PROCESS else None

    def remember(self, row: Row) -> Adjacency:
        return {} if self.shared is None else self.shared

    def propose(self, row: Row, memory: Adjacency, depth: int, min_score: float) -> TokenTree:
        tree = TokenTree.root(row.ids[-1])
        candidates: list[tuple[float, int, int, int]] = []  # (-score, of equal ones any, parent, token)
        node, score = 0, 1.0
        while True:
            if tree.depths[node] < depth:
                for rank, token in enumerate(memory.get(tree.tokens[node], ())):
                    weight = score * (1 - self.decay) * self.decay**rank
                    if weight < min_score:
                        break
                    heapq.heappush(candidates, (-weight, len(candidates), node, token))
            if not candidates or tree.drafted == self.max_candidates:
                return tree
            score, _, parent, token = heapq.heappop(candidates)
            score = -score
            node = tree.add(token, parent, self.source, score=score)

    def learn(self, row: Row, memory: Adjacency, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        successors = out.logits.topk(min(self.top, out.logits.shape[-1])).indices.tolist()
        memory.update(zip(tree.tokens, successors, strict=True))
