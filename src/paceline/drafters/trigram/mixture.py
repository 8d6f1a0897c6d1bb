"""What comes next, and how likely: P(w | context), put together from counted n-grams and the stored matrix.

From the longest context to the last token alone, each source in turn gives its share of the probability that the
sources before it have left over: the request's own counts, those shared between requests, the matrix. Counts leave
over what Witten and Bell's estimate gives to the unseen - of c counts among C with T different successors, c / (C + T)
for the successor and T / (C + T) for whatever it has not seen - and the matrix what its discount took off.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Integer

from paceline.compiled import compiled, int64
from paceline.drafters.trigram.counts import SEED, find, step
from paceline.drafters.trigram.matrix import PROBABILITIES, Table
from paceline.drafters.trigram.structures import LEAST, WIDTH, Counts, Ngrams

_P = PROBABILITIES


@compiled
def successors(ngrams: Ngrams, context: Integer[np.ndarray, " n-1"], tokens: np.ndarray, probs: np.ndarray) -> int:
    """Write what may follow `context` and its probabilities into `tokens` and `probs` `[WIDTH]`; returns how many.

    `context` holds the last n - 1 tokens, the last one at its end; -1 where there are fewer.
    """
    if ngrams.rule.literal:
        return _literal(ngrams, context, tokens, probs)
    size, left = int64(0), 1.0
    for order in range(ngrams.rule.order, 1, -1):
        hashed = _hash(context, order)
        size, left = _from_counts(ngrams.own, 1.0, hashed, left, size, tokens, probs)
        size, left = _from_counts(ngrams.shared, ngrams.rule.shared_scale, hashed, left, size, tokens, probs)
        table = ngrams.tables[ngrams.rule.order - order]
        start, stop = _find(table, context, order, ngrams.rule.bits)
        known, given = size, 0.0
        for place in range(start, stop):
            p = _P[table.codes[place]]
            size = _add(tokens, probs, size, known, int64(table.tokens[place]), left * p)
            given += p
        left *= max(1.0 - given, 0.0)
        if left < LEAST:
            break
    return size


@compiled
def _literal(ngrams: Ngrams, context: np.ndarray, tokens: np.ndarray, probs: np.ndarray) -> int:
    """The paper's: the matrix at order n, where Algorithm 2 raised each n-gram by `increment` a time, to `max_prob`."""
    rule, table = ngrams.rule, ngrams.tables[0]
    size = known = int64(0)
    start, stop = _find(table, context, rule.order, rule.bits)
    for place in range(start, stop):
        size = _add(tokens, probs, size, known, int64(table.tokens[place]), float(_P[table.codes[place]]))
    hashed, entries, known = _hash(context, rule.order), ngrams.own.entries, size
    counted = ngrams.own.slots[find(ngrams.own, hashed)]
    entry = int(counted.first) if counted.hash == hashed else -1
    while entry >= 0:
        token, raised = int64(entries[entry].token), rule.increment * entries[entry].count
        entry = int(entries[entry].next)
        place = _place(tokens, size, known, token)
        if place == size:
            tokens[place], probs[place] = token, 0.0
            size += 1
        if place >= 0:
            probs[place] = min(probs[place] + raised, rule.max_prob)
    return size


@compiled
def _from_counts(
    counts: Counts, scale: float, hashed: np.uint64, left: float, size: int, tokens: np.ndarray, probs: np.ndarray
) -> tuple[int, float]:
    counted, entries = counts.slots[find(counts, hashed)], counts.entries
    if counted.hash != hashed:
        return size, left
    novel = float(counted.kinds)
    total = scale * counted.total + novel
    known, walked, entry = size, 0, int(counted.first)
    while entry >= 0 and walked < WIDTH:  # the most recent ones, where there are more
        p = left * scale * entries[entry].count / total
        size = _add(tokens, probs, size, known, int64(entries[entry].token), p)
        entry = int(entries[entry].next)
        walked += 1
    return size, left * novel / total


@compiled
def _add(tokens: np.ndarray, probs: np.ndarray, size: int, known: int, token: int, p: float) -> int:
    """Give `p` to `token`, which may be among the first `known` already; returns the new size."""
    place = _place(tokens, size, known, token)
    if place == size:
        tokens[place], probs[place] = token, p
        return size + 1
    if place >= 0:
        probs[place] += p
    return size


@compiled
def _place(tokens: np.ndarray, size: int, known: int, token: int) -> int:
    """Where `token` is among the first `known`, or else will be; -1 if there is no room."""
    for place in range(known):
        if tokens[place] == token:
            return place
    return size if size < tokens.size else -1


@compiled
def _hash(context: np.ndarray, order: int) -> np.uint64:
    hashed = SEED
    for back in range(1, order):
        hashed = step(hashed, context[context.size - back])
    return hashed


@compiled
def _find(table: Table, context: np.ndarray, order: int, bits: int) -> tuple[int, int]:
    """Where the successors of the context's last `order - 1` tokens begin and end in the table."""
    vocab, first = table.heads.size - 1, context.size - order + 1
    for place in range(first, context.size):
        if not 0 <= context[place] < vocab:
            return 0, 0
    key = np.uint64(0)
    for place in range(first + 1, context.size):
        key = key << np.uint64(bits) | np.uint64(context[place])
    low, stop = int64(table.heads[context[first]]), int64(table.heads[context[first] + 1])
    high = stop
    while low < high:
        middle = (low + high) >> 1
        if np.uint64(table.keys[middle]) < key:
            low = middle + 1
        else:
            high = middle
    if low < stop and np.uint64(table.keys[low]) == key:
        return int64(table.offsets[low]), int64(table.offsets[low + 1])
    return 0, 0
