"""The compiled parts of the search, by numba: where the native tier's library is not there."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.drafters.trigram import counts, many
from paceline.drafters.trigram.counts import rebuild
from paceline.drafters.trigram.search import grow
from paceline.drafters.trigram.structures import Counts, Guidance, Ngrams, Plan, Rule, SearchArena, TextCounts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float, Integer
    from torch import Tensor

    from paceline.drafters.trigram.matrix import Table

__all__ = ["follow_all", "learn", "rebuild", "searcher"]


def learn(text: TextCounts, ids: Sequence[int], start: int, shortest: int, longest: int, weight: float) -> None:
    counts.learn(text.counts, np.array(ids, np.int64), start, shortest, longest, weight)


def follow_all(
    tables: tuple[Table, ...],
    shared: Counts,
    rule: Rule,
    counts: Integer[np.ndarray, "texts 5"],
    contexts: Integer[np.ndarray, "texts n-1"],
    tokens: Integer[np.ndarray, "texts depth"],
    scores: Float[np.ndarray, "texts depth"],
    sizes: Integer[np.ndarray, " texts"],
    guide: Guidance | None = None,
    hidden: Sequence[Float[Tensor, " hidden"] | None] = (),
) -> None:
    del guide, hidden  # the library's
    many.follow_all(tables, shared, rule, counts, contexts, tokens, scores, sizes)


class NumbaSearcher(NamedTuple):
    """See `kernels.Searcher`."""

    tables: tuple[Table, ...]
    rule: Rule
    plan: Plan
    arena: SearchArena
    guide: Guidance | None = None

    def grow(
        self,
        own: TextCounts,
        shared: TextCounts,
        tail: list[int],
        random: np.ndarray,
        depth: int,
        nodes: int,
        min_score: float,
        hidden: Float[Tensor, " hidden"] | None = None,
    ) -> int:
        rule = self.rule._replace(shared_scale=shared.scale)
        plan = self.plan._replace(depth=depth, nodes=nodes, min_score=min_score)
        ngrams = Ngrams(self.tables, own.counts, shared.counts, rule)
        return grow(ngrams, np.array(tail, np.int64), plan, self.arena, random)


searcher = NumbaSearcher
