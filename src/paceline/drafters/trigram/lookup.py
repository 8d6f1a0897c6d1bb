"""Drafts from n-grams of a corpus and of the text itself (ADED, Liu et al., 2024). Token ids only."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from paceline.drafters.trigram.kernels import kernels
from paceline.drafters.trigram.matrix import Matrix
from paceline.drafters.trigram.overlay import Overlay, places
from paceline.drafters.trigram.structures import Plan, Rule, new_arena
from paceline.drafting.lookup import Candidates, DraftSource, chain

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from paceline.drafters.trigram.structures import Guidance

log = logging.getLogger("paceline")


class Memory:
    """What is known of one text."""

    def __init__(self, overlay: Overlay, seed: int, skip: int) -> None:
        self.overlay, self.random = overlay, np.array([seed % 2**64], np.uint64)
        self.skip = skip  # leading tokens that are not learned from
        self.hidden: Float[Tensor, " hidden"] | None = None  # of the target, that the last token was told by
        self.seen = skip  # tokens that were, and those


class TrigramLookup(DraftSource):
    """A tree of likely continuations. The options are those of `drafters.trigram.drafter.Trigram`.

    Args:
        matrix: n-grams of a corpus.
        rule: how they and the text's own are read.
        plan: what to search for.
        native: search in the native tier's library, which must be there, instead of by numba.
        guide: says there which of the first tokens to expect, once a text's `Memory.hidden` is known.

    Attributes:
        guide: that one; it may also come later, while drafts are single paths.
    """

    source = "trigram"

    def __init__(
        self,
        matrix: Matrix,
        rule: Rule,
        plan: Plan,
        *,
        adapt: str,
        window: int,
        shared: float,
        seed: int,
        native: bool = False,
        guide: Guidance | None = None,
    ) -> None:
        self._compiled = kernels(native)
        self.tables, self.rule, self.plan = matrix.tables[matrix.order - rule.order :], rule, plan
        self.shared = Overlay(rule.order, half_life=shared or 1.0, compiled=self._compiled)
        self.shares, self.adapt, self.window, self.seed = shared > 0, adapt, window, seed
        self.learns_at_once = self.shares or rule.literal  # each round; else when a draft is asked for
        self.guide, self.native = guide, native
        self.arena = new_arena(rule.order, plan.iterations, plan.nodes)
        self._searcher = self._compiled.searcher(self.tables, rule, plan, self.arena, guide)
        self.chains = False
        if not native:
            self._compile()

    def to_chains(self) -> None:
        self.chains = True
        self.propose_all([[0]], [self.begin([0])], 1, 1)  # compiled now

    def begin(self, ids: Sequence[int]) -> Memory:
        order = self.rule.order
        overlay = Overlay(order, shortest=order if self.rule.literal else 2, compiled=self._compiled)
        memory = Memory(overlay, self.seed, skip=0 if self.adapt == "prompt" else len(ids))
        self._adapt(ids, memory)
        return memory

    def propose(self, ids: list[int], memory: Memory, depth: int, most: int, min_score: float = 0.0) -> Candidates:
        if self.chains:
            return self.propose_all([ids], [memory], depth, most)[0]
        self._catch_up(ids, memory)
        hidden = None if memory.hidden is None else memory.hidden.float().cpu().contiguous()
        place = self._tail(ids), memory.random
        depth, most = min(depth, self.plan.depth), min(most, self.plan.nodes)
        drawn = self._searcher.grow(memory.overlay, self.shared, *place, depth, most, min_score, hidden)
        tokens, parents = self.arena.drawn[:, :drawn].tolist()
        return Candidates(tokens, parents, self.arena.scores[:drawn].tolist(), [self.source] * drawn)

    def propose_all(
        self, texts: Sequence[list[int]], memories: Sequence[Memory], depth: int, most: int
    ) -> list[Candidates]:
        if not self.chains:
            return super().propose_all(texts, memories, depth, most)
        for ids, memory in zip(texts, memories, strict=True):
            self._catch_up(ids, memory)
        shape = len(texts), min(depth, most, self.plan.depth)
        tokens, scores, sizes = np.zeros(shape, np.int64), np.zeros(shape), np.zeros(len(texts), np.int64)
        contexts = np.array([self._tail(ids) for ids in texts], np.int64)
        counts = places([memory.overlay for memory in memories])
        rule = self.rule._replace(shared_scale=self.shared.scale)
        guided = (self.guide, [memory.hidden for memory in memories]) if self.guide else ()
        outputs = tokens, scores, sizes
        self._compiled.follow_all(self.tables, self.shared.counts, rule, counts, contexts, *outputs, *guided)
        rows = zip(tokens.tolist(), scores.tolist(), sizes.tolist(), strict=True)
        return [chain(row[:size], score[:size], self.source) for row, score, size in rows]

    def observe(self, ids: list[int], memory: Memory) -> None:
        if self.shares:
            self.shared.learn(ids, memory.seen)
        if self.learns_at_once:
            self._adapt(ids, memory)

    def told(self, memory: Memory, hidden: Float[Tensor, " hidden"] | None) -> None:
        memory.hidden = hidden

    def _tail(self, ids: Sequence[int]) -> list[int]:
        width = self.rule.order - 1
        return [-1] * (width - len(ids)) + list(ids[-width:])

    def _catch_up(self, ids: Sequence[int], memory: Memory) -> None:
        """Learn what has come, if that was left until a draft is asked for: where none is, nothing is learned."""
        if not self.learns_at_once:
            self._adapt(ids, memory)

    def _adapt(self, ids: Sequence[int], memory: Memory) -> None:
        """Self-improvement: Algorithm 2 goes over its window again, in our form each n-gram counts once."""
        if self.adapt != "none":
            again = self.rule.literal and memory.seen > memory.skip
            start = len(ids) - self.window + self.rule.order - 1 if again else memory.seen
            memory.overlay.learn(ids, max(start, memory.skip))
        memory.seen = len(ids)

    def _compile(self) -> None:
        """Have numba compile the search now, or read it from its cache, rather than in the first request's round."""
        started = time.perf_counter()
        overlay = Overlay(self.rule.order)
        overlay.learn([0, 0], 0)
        self._searcher.grow(overlay, self.shared, self._tail([]), np.zeros(1, np.uint64), 1, 1, 0.0)
        if (seconds := time.perf_counter() - started) > 3:
            log.info("trigram: compiled the search in %.0f s; from now on it comes from numba's cache", seconds)
