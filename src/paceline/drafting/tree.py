"""The token tree: what a drafter proposes and the target verifies in one pass."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from paceline.drafting.lookup import Candidates
from paceline.targets.span import Span


@dataclass
class TokenTree:
    """Candidate continuations of one request.

    Node 0 is the *root*: the request's last token, already part of the output but not yet in the KV cache. Every
    other node is a drafted token. A chain is a tree of width 1; a lone root is plain autoregressive decoding.

    Attributes:
        tokens: token id of each node.
        parents: parent of each node, always an earlier node; -1 for the root.
        q: for each node the distribution it was drawn from, or None where it was chosen deterministically.
            Siblings drawn with replacement may repeat a token: each is a trial of its own and must stay.
        sources: who proposed each node.
        scores: for each node the drafter's guess at the probability that it is accepted, or None where it has none
            and the node must stay. A budget is spent on the best.
        replacement: whether sampled siblings were drawn with replacement.
    """

    tokens: list[int]
    parents: list[int]
    q: list[Float[Tensor, " vocab"] | None]
    sources: list[str]
    scores: list[float | None]
    replacement: bool = True
    _depths: list[int] = field(default_factory=lambda: [0], repr=False)

    @classmethod
    def root(cls, token: int) -> TokenTree:
        return cls([token], [-1], [None], [""], [None])

    @classmethod
    def of(cls, root: int, found: Candidates) -> TokenTree:
        """A source's candidates after the text's last token."""
        depths = [0]
        for parent in found.parents:
            depths.append(depths[parent] + 1)
        return cls(
            [root, *found.tokens],
            [-1, *found.parents],
            [None] * len(depths),
            ["", *found.sources],
            [None, *found.scores],
            _depths=depths,
        )

    def add(self, token: int, parent: int, source: str, q: Tensor | None = None, score: float | None = None) -> int:
        """Append a node; returns its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.q.append(q)
        self.sources.append(source)
        self.scores.append(score)
        self._depths.append(self._depths[parent] + 1)
        return len(self.tokens) - 1

    def add_path(self, tokens: Sequence[int], source: str, parent: int = 0) -> int:
        """Insert a deterministic continuation, sharing the prefix that is there already; returns its last node."""
        for token in tokens:
            parent = self.child(parent, token) or self.add(token, parent, source)
        return parent

    def keep(self, nodes: Sequence[int]) -> TokenTree:
        """The tree of the root and these nodes, in this order: parents before children."""
        kept = TokenTree.root(self.tokens[0])
        kept.replacement = self.replacement
        place = {0: 0}
        for node in nodes:
            parent = place[self.parents[node]]
            place[node] = kept.add(self.tokens[node], parent, self.sources[node], self.q[node], self.scores[node])
        return kept

    def without(self, nodes: Collection[int]) -> TokenTree:
        """The tree without these nodes, as far as they may be left out, which those without a score may not."""
        kept, needed = list[int](), set[int]()
        for node in range(len(self) - 1, 0, -1):
            if node in needed or node not in nodes or self.scores[node] is None or self.q[node] is not None:
                kept.append(node)
                needed.add(self.parents[node])
        return self if len(kept) == self.drafted else self.keep(kept[::-1])

    def best_chain(self) -> TokenTree:
        """The path that promises the most accepted tokens, for a target that reads chains only.

        Where nodes were drawn at random it goes down the first children: which of several draws is kept must not depend
        on what was drawn.
        """
        if self.is_chain:
            return self
        if self.sampled:
            node, path = 0, []
            while children := self.children(node):
                path.append(node := children[0])
            return self.keep(path)
        return self.keep(self.most_promising([1.0 if score is None else score for score in self.scores]))

    def most_promising(self, probabilities: Sequence[float]) -> list[int]:
        """Of all paths from the root, without it, the one of which most tokens are expected to be accepted.

        Args:
            probabilities: of all nodes, that they are.
        """
        promise = [0.0]
        for parent, probability in zip(self.parents[1:], probabilities[1:], strict=True):
            promise.append(promise[parent] + probability)
        return self.path(max(range(len(self)), key=promise.__getitem__))[1:]

    def child(self, parent: int, token: int) -> int | None:
        """The first child of `parent` that holds `token`."""
        for node in range(parent + 1, len(self.tokens)):
            if self.parents[node] == parent and self.tokens[node] == token:
                return node
        return None

    def children(self, parent: int) -> list[int]:
        return [node for node in range(parent + 1, len(self.tokens)) if self.parents[node] == parent]

    def path(self, node: int) -> list[int]:
        """The nodes from the root to `node`, both included."""
        path = [node]
        while (node := self.parents[node]) >= 0:
            path.append(node)
        return path[::-1]

    def __len__(self) -> int:
        """Nodes, the root included."""
        return len(self.tokens)

    @property
    def drafted(self) -> int:
        return len(self.tokens) - 1

    @property
    def depths(self) -> list[int]:
        return self._depths

    @property
    def depth(self) -> int:
        """Length of the longest path below the root."""
        return max(self._depths)

    @property
    def is_chain(self) -> bool:
        return self.depth == self.drafted

    @property
    def sampled(self) -> bool:
        """Whether any node was drawn at random."""
        return any(q is not None for q in self.q)


def last_nodes(trees: Sequence[TokenTree], lengths: np.ndarray, depth: int, device: torch.device) -> Span:
    """A drafter's pass over the last nodes of chains that are `depth` long. A row that stopped earlier has its last
    token run again further on, where nothing sees it. One whose chain is longer, since the rest was copied, has its
    node of that depth run.
    """
    ids = torch.tensor([[tree.tokens[min(depth, len(tree) - 1)]] for tree in trees], device=device)
    return Span(ids, lengths.copy(), offset=depth)


def tree_span(trees: Sequence[TokenTree], lengths: np.ndarray, device: torch.device) -> Span:
    """The verification pass over one tree a row, padded to the widest.

    Padding nodes repeat the root's token and see the root only.
    """
    sizes = [len(tree) for tree in trees]
    width = max(sizes)
    counts = None if min(sizes) == width else np.array(sizes, np.int64)
    ids = np.array([tree.tokens + tree.tokens[:1] * (width - len(tree)) for tree in trees])
    if all(tree.is_chain for tree in trees):
        return Span(torch.from_numpy(ids).to(device), lengths.copy(), counts=counts)
    depths = np.zeros_like(ids)
    seen = np.zeros((len(trees), width, width), dtype=bool)
    seen[:, :, 0] = True
    for row, tree in enumerate(trees):
        depths[row, : len(tree)] = tree.depths
        for node in range(1, len(tree)):
            seen[row, node] = seen[row, tree.parents[node]]
            seen[row, node, node] = True
    return Span(
        torch.from_numpy(ids).to(device),
        lengths.copy(),
        depths=torch.from_numpy(depths).to(device),
        ancestors=torch.from_numpy(seen).to(device),
        counts=counts,
    )
