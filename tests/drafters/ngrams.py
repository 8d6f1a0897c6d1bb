"""n-gram models for the tests of the trigram drafter, and a plain reading of the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from paceline.drafters.trigram.matrix import Matrix, Table, dtypes, encode, no_matrix, token_bits
from paceline.drafters.trigram.mixture import successors
from paceline.drafters.trigram.overlay import Overlay
from paceline.drafters.trigram.structures import LEAST, WIDTH, Ngrams, Rule

Rows = dict[tuple[int, ...], dict[int, float]]  # context -> successor -> probability or count


def matrix_of(rows: Rows, order: int, vocab: int) -> Matrix:
    """A matrix of the given rows, whose contexts may have any length below `order`."""
    kinds, bits, tables = dtypes(order, vocab), token_bits(vocab), []
    for k in range(order, 1, -1):
        contexts = sorted(context for context in rows if len(context) == k - 1)
        heads, keys, offsets, tokens, codes = np.zeros(vocab + 1, int), [], [0], [], []
        for context in contexts:
            heads[context[0] + 1 :] += 1
            keys.append(sum(token << bits * place for place, token in enumerate(reversed(context[1:]))))
            for token, p in sorted(rows[context].items(), key=lambda item: -item[1]):
                tokens.append(token)
                codes.append(int(encode(np.array([p]))[0]))
            offsets.append(len(tokens))
        arrays = (np.array(a, kinds[f]) for f, a in zip(kinds, (heads, keys, offsets, tokens, codes), strict=True))
        tables.append(Table(*map(frozen, arrays)))
    return Matrix(order, vocab, tuple(tables), {})


def frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def ngrams_of(own: Overlay, matrix: Matrix | None = None, shared: Overlay | None = None, **rule: object) -> Ngrams:
    matrix = matrix or no_matrix(own.longest, 257)
    shared = shared or Overlay(own.longest)
    fields = {"literal": False, "increment": 0.3, "max_prob": 1.0, "shared_scale": shared.scale, **rule}
    return Ngrams(
        matrix.tables, own.counts, shared.counts, Rule(order=matrix.order, bits=token_bits(matrix.vocab), **fields)
    )


def following(ngrams: Ngrams, context: Sequence[int]) -> dict[int, float]:
    """What compiled code says may follow."""
    width = ngrams.rule.order - 1
    tail = np.array([-1] * (width - len(context)) + list(context[-width:]), np.int64)
    tokens, probs = np.zeros(WIDTH, np.int64), np.zeros(WIDTH)
    size = successors(ngrams, tail, tokens, probs)
    assert len(set(tokens[:size].tolist())) == size
    return dict(zip(tokens[:size].tolist(), probs[:size].tolist(), strict=True))


def counts_of(texts: Sequence[Sequence[int]], order: int) -> Rows:
    rows: Rows = {}
    for ids in texts:
        for k in range(2, order + 1):
            for at in range(len(ids) - k + 1):
                *context, token = ids[at : at + k]
                row = rows.setdefault(tuple(context), Counter())
                row[token] += 1
    return rows


def discounted(texts: Sequence[Sequence[int]], order: int, vocab: int) -> Matrix:
    """A matrix of what these texts count, as `paceline trigram build` discounts it."""
    rows = counts_of(texts, order)
    return matrix_of(
        {
            context: {token: (count - 0.75) / sum(row.values()) for token, count in row.items()}
            for context, row in rows.items()
        },
        order,
        vocab,
    )


def mixed(sources: Sequence[tuple[str, Rows]], context: Sequence[int], order: int) -> dict[int, float]:
    """`successors` as its docstring has it."""
    p, left = Counter[int](), 1.0
    for k in range(min(order, len(context) + 1), 1, -1):
        for kind, rows in sources:
            row = rows.get(tuple(context[-k + 1 :]))
            if not row:
                continue
            total = sum(row.values()) + len(row) if kind == "counts" else 1.0
            for token, share in row.items():
                p[token] += left * share / total
            left *= len(row) / total if kind == "counts" else max(1 - sum(row.values()), 0.0)
        if left < LEAST:
            break
    return dict(p)
