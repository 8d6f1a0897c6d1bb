"""REST (He et al., 2023): what followed the longest suffix of the context in a datastore, as a tree."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Integer

from paceline.compiled import compiled
from paceline.drafters.rest.datastore import Datastore, datastore_folder, load_datastore
from paceline.drafting.base import Row
from paceline.drafting.tree import TokenTree
from paceline.drafting.tree_drafter import TreeDrafter
from paceline.errors import require
from paceline.targets.target import Target

CONTINUATIONS = 512  # most that are read; of more, so many that stand evenly apart in their order


class Trie(NamedTuple):
    """Continuations with common beginnings merged; parents before children, node 0 is the root."""

    tokens: Integer[np.ndarray, " nodes"]
    parents: Integer[np.ndarray, " nodes"]
    counts: Integer[np.ndarray, " nodes"]  # continuations that go through a node
    scores: Float[np.ndarray, " nodes"]


class Rest(TreeDrafter):
    """What a datastore has behind the longest suffix of the context that it holds.

    Args:
        datastore: folder that `paceline rest build` made, or a loaded `Datastore` (from Python); "auto": the user's own
            for this model (`datastore_folder`).
        longest, shortest: spans of the context that are looked up, the longest first.
        budget: most nodes of the tree (the paper's 64 "draft choices"); "auto": as many as pay on this machine.

    Raises:
        IntegrityError, TokenizerMismatch: the datastore cannot be used.
    """

    default_policy = "fixed:k=6"
    source = "rest"

    def __init__(
        self,
        target: Target,
        *,
        datastore: str = "auto",
        longest: int = 16,
        shortest: int = 2,
        budget: int | str = "auto",
    ) -> None:
        super().__init__(target, budget)
        require(1 <= shortest <= longest, f"rest: need 1 <= shortest <= longest, not {shortest} and {longest}")
        self.store = datastore if isinstance(datastore, Datastore) else _load(target, datastore)
        self.longest, self.shortest = longest, shortest
        lookup(self.store, np.zeros(1, np.int64), 1, 1)  # compiled now, not in the first request's round

    def propose(self, row: Row, memory: None, depth: int, min_score: float) -> TokenTree:
        tree = TokenTree.root(row.ids[-1])
        trie = lookup(self.store, np.array(row.ids[-self.longest :], np.int64), self.shortest, depth)
        order = np.lexsort((np.arange(len(trie.scores)), -trie.scores))[
            1 : self.max_candidates + 1
        ]  # stable, without the root
        place = {0: 0}
        for node in order[trie.scores[order] >= min_score].tolist():
            parent = place[int(trie.parents[node])]
            place[node] = tree.add(int(trie.tokens[node]), parent, self.source, score=float(trie.scores[node]))
        return tree


def _load(target: Target, datastore: str) -> Datastore:
    path = datastore_folder(target.name) if datastore == "auto" else Path(datastore).expanduser()
    require(
        datastore != "auto" or path.exists(),
        "rest: this model has no datastore: make one with 'paceline rest build', or name one with datastore=DIR",
    )
    return load_datastore(path, target.tokenizer, target.vocab_size)


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
