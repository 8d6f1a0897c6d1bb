"""The compiled parts of the search, by numba: where the native tier's library is not there."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.drafters.trigram import counts
from paceline.drafters.trigram.counts import rebuild
from paceline.drafters.trigram.many import follow_all
from paceline.drafters.trigram.search import grow
from paceline.drafters.trigram.structures import Guidance, Ngrams, Plan, Rule, SearchArena, TextCounts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float
    from torch import Tensor

    from paceline.drafters.trigram.matrix import Table

__all__ = ["follow_all", "learn", "rebuild", "searcher"]


def learn(text: TextCounts, ids: Sequence[int], start: int, shortest: int, longest: int, weight: float) -> None:
    counts.learn(text.counts, np.array(ids, np.int64), start, shortest, longest, weight)


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
