"""The compiled parts of the search, by numba: for targets that do not run on the native tier's library."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.drafters.trigram.counts import learn, rebuild
from paceline.drafters.trigram.many import follow_all
from paceline.drafters.trigram.search import grow
from paceline.drafters.trigram.structures import Ngrams, Plan, Rule, SearchArena, TextCounts

if TYPE_CHECKING:
    from paceline.drafters.trigram.matrix import Table

__all__ = ["follow_all", "learn", "rebuild", "searcher"]


class NumbaSearcher(NamedTuple):
    """See `kernels.Searcher`."""

    tables: tuple[Table, ...]
    rule: Rule
    plan: Plan
    arena: SearchArena

    def grow(
        self,
        own: TextCounts,
        shared: TextCounts,
        tail: list[int],
        random: np.ndarray,
        depth: int,
        nodes: int,
        min_score: float,
    ) -> int:
        rule = self.rule._replace(shared_scale=shared.scale)
        plan = self.plan._replace(depth=depth, nodes=nodes, min_score=min_score)
        ngrams = Ngrams(self.tables, own.counts, shared.counts, rule)
        return grow(ngrams, np.array(tail, np.int64), plan, self.arena, random)


searcher = NumbaSearcher
