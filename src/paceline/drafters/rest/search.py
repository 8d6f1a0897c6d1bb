"""What followed the longest suffix of a text in a datastore, as a tree (REST, He et al., 2023). Token ids only."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float, Integer

from paceline.compiled import compiled
from paceline.drafting.lookup import Candidates, DraftSource

if TYPE_CHECKING:
    from paceline.drafters.rest.datastore import Datastore

CONTINUATIONS = 512  # most that are read; of more, so many that stand evenly apart in their order


class Trie(NamedTuple):
    """Continuations with common beginnings merged; parents before children, node 0 is the root."""

    tokens: Integer[np.ndarray, " nodes"]
    parents: Integer[np.ndarray, " nodes"]
    counts: Integer[np.ndarray, " nodes"]  # continuations that go through a node
    scores: Float[np.ndarray, " nodes"]


class RestLookup(DraftSource):
    """What a datastore has after the longest suffix of the text that it holds. See `drafters.rest.drafter.Rest`."""

    source = "rest"

    def __init__(self, store: Datastore, longest: int, shortest: int) -> None:
        self.store, self.longest, self.shortest = store, longest, shortest
        lookup(store, np.zeros(1, np.int64), 1, 1)  # compiled now, not in the first request's round

    def propose(self, ids: list[int], memory: None, depth: int, most: int, min_score: float = 0.0) -> Candidates:
        trie = lookup(self.store, np.array(ids[-self.longest :], np.int64), self.shortest, depth)
        order = np.lexsort((np.arange(len(trie.scores)), -trie.scores))[1 : most + 1]  # stable, without the root
        order = order[trie.scores[order] >= min_score]
        place = {node: at for at, node in enumerate([0, *order.tolist()])}
        parents = [place[node] for node in trie.parents[order].tolist()]
        return Candidates(
            trie.tokens[order].tolist(), parents, trie.scores[order].tolist(), [self.source] * len(parents)
        )


def lookup(store: Datastore, context: Integer[np.ndarray, " tokens"], shortest: int, depth: int) -> Trie:
    """What follows the longest suffix of `context` that the datastore holds, up to `depth` tokens of each place.

    A continuation seen c times among C, in T kinds, follows with probability c / (C + T) (Witten and Bell's estimate).
    """
    length, low, high = _longest(store.tokens, store.suffixes, context, shortest)
    count = min(high - low, CONTINUATIONS)
    places = store.suffixes[low + np.arange(count) * (high - low) // max(count, 1)].astype(np.int64)
    return _merge(store.tokens, places + length, depth, store.vocab)


@compiled
def _longest(
    tokens: np.ndarray, suffixes: np.ndarray, context: Integer[np.ndarray, " tokens"], shortest: int
) -> tuple[int, int, int]:
    """Length of the longest suffix of `context` that occurs, and the range of `suffixes` that begin with it."""
    for length in range(context.size, shortest - 1, -1):
        span = context[context.size - length :]
        low = _bound(tokens, suffixes, span, False)
        high = _bound(tokens, suffixes, span, True)
        if low < high:
            return length, low, high
    return 0, 0, 0


@compiled
def _bound(tokens: np.ndarray, suffixes: np.ndarray, span: np.ndarray, behind: bool) -> int:
    """Where the suffixes that begin with `span` begin, or end."""
    low, high = 0, suffixes.size
    while low < high:
        middle = (low + high) >> 1
        start, order = int(suffixes[middle]), 0
        for at in range(span.size):
            if start + at >= tokens.size:
                order = -1  # a text that ends comes before all that go on
                break
            order = int(tokens[start + at]) - span[at]
            if order != 0:
                break
        if order < 0 or (behind and order == 0):
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _merge(tokens: np.ndarray, places: Integer[np.ndarray, " continuations"], depth: int, vocab: int) -> Trie:
    """The trie of the texts at `places`, which are in lexicographic order: each shares its beginning with the last."""
    room = 1 + places.size * depth
    trie = Trie(
        np.zeros(room, np.int64), np.full(room, -1, np.int64), np.zeros(room, np.int64), np.ones(room, np.float64)
    )
    path = np.zeros(depth + 1, np.int64)  # nodes of the last continuation
    deep, used = 0, 1
    for place in places:
        trie.counts[0] += 1
        same = True
        at = 0
        while at < depth and place + at < tokens.size and tokens[place + at] != vocab:
            token = np.int64(tokens[place + at])
            same = same and at < deep and trie.tokens[path[at + 1]] == token
            if not same:
                trie.tokens[used], trie.parents[used] = token, path[at]
                path[at + 1] = used
                used += 1
            at += 1
            trie.counts[path[at]] += 1
        deep = at
    kinds = np.zeros(used, np.int64)
    for node in range(1, used):
        kinds[trie.parents[node]] += 1
    for node in range(1, used):
        parent = trie.parents[node]
        trie.scores[node] = trie.scores[parent] * trie.counts[node] / (trie.counts[parent] + kinds[parent])
    return Trie(trie.tokens[:used], trie.parents[:used], trie.counts[:used], trie.scores[:used])
