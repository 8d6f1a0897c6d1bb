"""Sources of drafts that need nothing but token ids: no model, no torch, no engine of a certain make.

paceline's drafters wrap them (`drafting.tree_drafter.LookupDrafter`), and so do the integrations with other engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class Candidates(NamedTuple):
    """Candidate continuations of one text, as a tree: node `n`, from 1, is in place `n - 1` of each list.

    Attributes:
        tokens: token id of each node.
        parents: parent of each node, always an earlier one; 0 is the end of the text.
        scores: the source's guess at the probability that the path up to a node is right.
        sources: who proposed each node.
    """

    tokens: list[int]
    parents: list[int]
    scores: list[float]
    sources: list[str]

    def add(self, token: int, parent: int, score: float, source: str) -> None:
        """Append a node."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)
        self.sources.append(source)

    def path(self, node: int) -> list[int]:
        """The nodes from the first one down to `node`."""
        path = []
        while node:
            path.append(node)
            node = self.parents[node - 1]
        return path[::-1]

    @property
    def is_chain(self) -> bool:
        """Whether each node follows the one before it."""
        return self.parents == list(range(len(self.parents)))

    def best_path(self) -> list[int]:
        """The nodes of the path that promises the most right tokens: with the greatest sum of scores."""
        if self.is_chain:
            return list(range(1, len(self.parents) + 1))
        promise = [0.0]
        for parent, score in zip(self.parents, self.scores, strict=True):
            promise.append(promise[parent] + score)
        return self.path(max(range(len(promise)), key=promise.__getitem__))


def copied(ids: list[int], at: int, count: int) -> list[int]:
    """`count` tokens from `ids[at]` on. After the end the copy goes on with itself: what repeats, repeats further."""
    found, period = ids[at : at + count], len(ids) - at
    while period and len(found) < count:
        found.append(found[-period])
    return found


def likely(matched: int) -> float:
    """How likely the token after an earlier occurrence of the last `matched` tokens follows again."""
    return 1 - 1 / (matched + 0.2)


def chain(tokens: list[int], scores: list[float], source: str) -> Candidates:
    """Candidates that follow one another."""
    return Candidates(tokens, list(range(len(tokens))), scores, [source] * len(tokens))


class DraftSource:
    """Proposes continuations of texts that grow. What it knows of one text is its memory; dropped, it is forgotten."""

    #: What it calls itself in the statistics.
    source = ""

    def begin(self, ids: Sequence[int]) -> Any:
        """The memory of a text that begins with these tokens: its prompt."""

    def propose(self, ids: list[int], memory: Any, depth: int, most: int, min_score: float = 0.0) -> Candidates:
        """What may follow `ids`, the whole text.

        Args:
            depth: most tokens of a path, above 0.
            most: most nodes. The best come first: of two limits the smaller one's answer begins the larger one's.
            min_score: nodes with lower scores are not needed.
        """
        raise NotImplementedError

    def propose_all(
        self, texts: Sequence[list[int]], memories: Sequence[Any], depth: int, most: int
    ) -> list[Candidates]:
        """`propose` for many texts, in one call where that is faster."""
        return [self.propose(ids, memory, depth, most) for ids, memory in zip(texts, memories, strict=True)]

    def observe(self, ids: list[int], memory: Any) -> None:
        """A round has passed: the text is now `ids`."""

    def told(self, memory: Any, hidden: Float[Tensor, " hidden"] | None) -> None:
        """The target's hidden state that the last token was told by, where it is known: its last layer's."""

    def to_chains(self) -> None:
        """From now on propose single paths where that is less work: the engine verifies chains only."""


class MergedLookup(DraftSource):
    """Several sources at once: what they propose becomes one tree, in which a token stands once, with its best score.

    Args:
        parts: the sources. Of two that propose the same with the same score, the first counts as its source.
    """

    source = "merge"

    def __init__(self, parts: Sequence[DraftSource]) -> None:
        self.parts = list(parts)

    def to_chains(self) -> None:
        for part in self.parts:
            part.to_chains()

    def begin(self, ids: Sequence[int]) -> list[Any]:
        return [part.begin(ids) for part in self.parts]

    def propose(self, ids: list[int], memory: list[Any], depth: int, most: int, min_score: float = 0.0) -> Candidates:
        return united(
            [part.propose(ids, own, depth, most, min_score) for part, own in zip(self.parts, memory, strict=True)]
        )

    def propose_all(
        self, texts: Sequence[list[int]], memories: Sequence[Any], depth: int, most: int
    ) -> list[Candidates]:
        found = [
            part.propose_all(texts, [memory[at] for memory in memories], depth, most)
            for at, part in enumerate(self.parts)
        ]
        return [united(drafts) for drafts in zip(*found, strict=True)]

    def observe(self, ids: list[int], memory: list[Any]) -> None:
        for part, own in zip(self.parts, memory, strict=True):
            part.observe(ids, own)

    def told(self, memory: list[Any], hidden: Float[Tensor, " hidden"] | None) -> None:
        for part, own in zip(self.parts, memory, strict=True):
            part.told(own, hidden)


def united(drafts: Sequence[Candidates]) -> Candidates:
    """One tree of several: each token once after what comes before it, with the highest of its scores."""
    first, *others = [draft for draft in drafts if draft.tokens] or drafts
    if not others:
        return first
    if len(others) == 1 and first.is_chain and others[0].is_chain:
        return _forked(first, others[0])
    tree = Candidates(first.tokens[:], first.parents[:], first.scores[:], first.sources[:])
    places = {key: node for node, key in enumerate(zip(tree.parents, tree.tokens, strict=True), start=1)}
    for other in others:
        to = [0]
        for token, parent, score, source in zip(*other, strict=True):
            key = to[parent], token
            node = places.get(key)
            if node is None:
                tree.add(token, key[0], score, source)
                node = places[key] = len(tree.tokens)
            elif score > tree.scores[node - 1]:
                tree.scores[node - 1], tree.sources[node - 1] = score, source
            to.append(node)
    return tree


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Of the longest common beginning."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _forked(one: Candidates, other: Candidates) -> Candidates:
    """`united` of two chains, which part at most once."""
    same = common_length(one.tokens, other.tokens)
    scores, sources = one.scores[:], one.sources[:]
    for at in range(same):
        if other.scores[at] > scores[at]:
            scores[at], sources[at] = other.scores[at], other.sources[at]
    size, left = len(one.tokens), len(other.tokens) - same
    parents = [*one.parents, *[same][:left], *range(size + 1, size + left)]
    return Candidates(
        one.tokens + other.tokens[same:], parents, scores + other.scores[same:], sources + other.sources[same:]
    )
