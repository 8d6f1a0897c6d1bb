"""The compiled parts of the search: numba's, or those in the native tier's library. Bit for bit the same drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from jaxtyping import Float, Integer

from paceline.drafters.trigram.matrix import Table
from paceline.drafters.trigram.structures import Counts, Guidance, Plan, Rule, SearchArena, TextCounts

if TYPE_CHECKING:
    from torch import Tensor


class Searcher(Protocol):
    """`trigram.search.grow`, again and again: what stays is handed over once."""

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
        """A draft, into the arena; `depth`, `nodes` and `min_score` take the place of the plan's.

        Args:
            hidden: the target's hidden state that the last token was told by: what a guide reads.
        """
        ...


class Kernels(Protocol):
    """See `trigram.counts`, `trigram.search` and `trigram.many`, which numba compiles."""

    def learn(
        self, text: TextCounts, ids: Sequence[int], start: int, shortest: int, longest: int, weight: float
    ) -> None: ...

    def rebuild(self, old: Counts, new: Counts, factor: float, least: float) -> None: ...

    def searcher(
        self, tables: tuple[Table, ...], rule: Rule, plan: Plan, arena: SearchArena, guide: Guidance | None = None
    ) -> Searcher: ...  # numba's do without a guide

    def follow_all(
        self,
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
    ) -> None: ...  # numba's without a guide


def kernels(native: bool = False) -> Kernels:
    """Those of the native tier's library, or numba's.

    Raises:
        NativeUnavailable: the library cannot be built here.
    """
    if native:
        from paceline.drafters.trigram import native as library

        return library
    from paceline.drafters.trigram import jit  # numba takes a second to import, and to read its cache

    return jit
