"""The compiled parts of the search in the native tier's library. The structures mirror ngrams.h and search.cpp."""

from __future__ import annotations

import ctypes
from array import array
from ctypes import byref, c_double, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Integer

from paceline.drafters.trigram.matrix import PROBABILITIES, Table
from paceline.drafters.trigram.structures import place_of
from paceline.targets.native.build import library

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.drafters.trigram.structures import Counts, Guidance, Plan, Rule, SearchArena, TextCounts


class CCounts(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("slots", "entries", "used")),
        ("slot_count", c_int64),
        ("room", c_int64),
    )


class CTable(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in Table._fields),
        ("vocabulary", c_int64),
        ("key_bytes", c_int32),
        ("token_bytes", c_int32),
    )


class CRule(ctypes.Structure):
    _fields_ = (
        *((name, c_double) for name in ("increment", "max_prob", "shared_scale")),
        *((name, c_int32) for name in ("order", "bits", "literal")),
    )


class CNgrams(ctypes.Structure):
    _fields_ = (
        ("tables", ctypes.POINTER(CTable)),
        ("probabilities", c_void_p),
        ("own", CCounts),
        ("shared", CCounts),
        ("rule", CRule),
    )


class CPlan(ctypes.Structure):
    _fields_ = (
        *((name, c_double) for name in ("c1", "c2", "min_score")),
        *((name, c_int32) for name in ("iterations", "depth", "candidates", "nodes", "rank", "literal")),
    )


class CArena(ctypes.Structure):
    _fields_ = tuple((name, c_void_p) for name in ("nodes", "heap", "context", "tokens", "parents", "scores"))


def learn(text: TextCounts, ids: Sequence[int], start: int, shortest: int, longest: int, weight: float) -> None:
    tail = array("q", ids)
    call = library().paceline_ngrams_learn
    call(byref(CCounts(*text.place)), tail.buffer_info()[0], len(tail), start, shortest, longest, weight)


def rebuild(old: Counts, new: Counts, factor: float, least: float) -> None:
    before, after = CCounts(*place_of(old)), CCounts(*place_of(new))
    library().paceline_ngrams_rebuild(byref(before), byref(after), factor, least)


class LibrarySearcher:
    """See `kernels.Searcher`."""

    def __init__(
        self, tables: tuple[Table, ...], rule: Rule, plan: Plan, arena: SearchArena, guide: Guidance | None = None
    ) -> None:
        self._keep = tables, arena  # the structures point into them
        self._guide = guide
        self._ngrams, self._plan = ngrams_of(tables, (), (), rule), CPlan(**plan._asdict())
        arrays = (arena.nodes, arena.heap, arena.context, *arena.drawn, arena.scores)
        self._arena = CArena(*(each.ctypes.data for each in arrays))
        self._tail = (c_int64 * (rule.order - 1))()
        self._fixed = byref(self._ngrams), byref(self._plan), byref(self._arena), self._tail
        self._call = library().paceline_ngrams_grow

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
        ngrams, plan = self._ngrams, self._plan
        ngrams.own, ngrams.shared, ngrams.rule.shared_scale = CCounts(*own.place), CCounts(*shared.place), shared.scale
        plan.depth, plan.nodes, plan.min_score = depth, nodes, min_score
        self._tail[:] = [*tail]
        guided = (byref(self._guide.c), hidden.data_ptr()) if self._guide and hidden is not None else (None, None)
        grown: int = self._call(*self._fixed, random.ctypes.data, *guided)
        return grown


searcher = LibrarySearcher


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
    read = ngrams_of(tables, (), place_of(shared), rule)
    outputs = (each.ctypes.data for each in (tokens, scores, sizes))
    states = (c_void_p * len(hidden))(*(None if state is None else state.data_ptr() for state in hidden))
    guided = (byref(guide.c), states) if guide else (None, None)
    call = library().paceline_ngrams_follow
    call(byref(read), counts.ctypes.data, contexts.ctypes.data, *tokens.shape, *outputs, *guided)


def ngrams_of(tables: tuple[Table, ...], own: tuple[int, ...], shared: tuple[int, ...], rule: Rule) -> CNgrams:
    """Points into the arrays, which must stay alive."""
    return CNgrams(
        (CTable * len(tables))(*map(_table, tables)),
        PROBABILITIES.ctypes.data,
        CCounts(*own),
        CCounts(*shared),
        CRule(**rule._asdict()),
    )


def _table(table: Table) -> CTable:
    addresses = (each.ctypes.data for each in table)
    return CTable(*addresses, table.heads.size - 1, table.keys.itemsize, table.tokens.itemsize)
