"""Drafts for many texts in one compiled call, each with counts of its own: where engines serve many requests, most of
the time of a call from Python would go into handing over the arrays that all of them share.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float, Integer
from numba import carray
from numba.core import cgutils, types
from numba.extending import intrinsic

from paceline.compiled import compiled
from paceline.drafters.trigram.matrix import Table
from paceline.drafters.trigram.mixture import successors
from paceline.drafters.trigram.structures import ENTRY, SLOT, WIDTH, Counts, Ngrams, Rule


def _to_pointer(_typing: Any, _address: Any) -> Any:

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


_pointer: Any = intrinsic(_to_pointer)  # address -> pointer


@compiled
def follow_all(
    tables: tuple[Table, ...],
    shared: Counts,
    rule: Rule,
    counts: Integer[np.ndarray, "texts 5"],
    contexts: Integer[np.ndarray, "texts n-1"],
    tokens: Integer[np.ndarray, "texts depth"],
    scores: Float[np.ndarray, "texts depth"],
    sizes: Integer[np.ndarray, " texts"],
) -> None:
    """After each context the likeliest token, again and again: the best-first search's draft of a single path.

    Args:
        counts: as `overlay.places` gives them; the overlays must be alive.
        contexts: the last tokens of each text, -1 where there are fewer; overwritten.
        tokens, scores: of each draft: the tokens, and the probability of the path up to each.
        sizes: how many there are.
    """
    found, probs = np.zeros(WIDTH, np.int64), np.zeros(WIDTH, np.float64)
    for text in range(contexts.shape[0]):
        own = Counts(
            carray(_pointer(counts[text, 0]), (counts[text, 3],), SLOT),
            carray(_pointer(counts[text, 1]), (counts[text, 4],), ENTRY),
            carray(_pointer(counts[text, 2]), (2,), np.int64),
        )
        ngrams, context, path, size = Ngrams(tables, own, shared, rule), contexts[text], 1.0, 0
        while size < tokens.shape[1]:
            count = successors(ngrams, context, found, probs)
            if count == 0:
                break
            best = 0
            for place in range(1, count):
                if probs[place] > probs[best]:
                    best = place
            path *= probs[best]
            tokens[text, size], scores[text, size] = found[best], path
            context[:-1] = context[1:]
            context[-1] = found[best]
            size += 1
        sizes[text] = size
