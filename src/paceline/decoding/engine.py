"""The engine: rounds of drafting and verifying over a batch of requests that come and go."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from paceline.decoding.request import Request
from paceline.decoding.stats import Clock, Round
from paceline.decoding.verify import Outcome, walk
from paceline.drafting.base import Drafter
from paceline.drafting.tree import TokenTree, tree_span
from paceline.errors import require
from paceline.policies.base import Setting
from paceline.targets.cache import KVCache
from paceline.targets.identity import model_key
from paceline.targets.logits import argmax
from paceline.targets.target import PassOutput, Target


class Engine:
    """Runs requests on a target with a drafter. Not thread-safe: one run at a time."""

    def __init__(self, target: Target, drafter: Drafter) -> None:
        self.target, self.drafter = target, drafter

    @torch.inference_mode()
    def run(self, requests: Sequence[Request], batch: int | None = None) -> Iterator[Request]:
        """Continue the requests, at most `batch` at a time; yields each after every round it took part in.

        Raises:
            ContextOverflow: before anything is computed, when a request cannot fit the model's context.
            OptionError: when `batch` is below 1.
        """
        require(batch is None or batch >= 1, f"batch must be at least 1, not {batch}")
        if not requests:
            return
        setting = self.setting
        for request in requests:
            self.target.check_fits(request.prompt_length, request.limit)
            request.policy.check(setting)
        waiting, rows = deque(requests), list[Request]()
        cache = self._allocate(requests, min(batch or len(requests), len(requests)))
        self.drafter.start(cache)
        while waiting or rows:
            while waiting and len(rows) < cache.batch:
                self._join(waiting.popleft(), rows, cache)
            self._round(rows, cache)
            yield from rows
            self._leave(rows, cache)

    def _round(self, rows: list[Request], cache: KVCache) -> None:
        clock = Clock()
        trees = self.drafter.draft(rows)
        clock.lap("draft")

        cache = cache.rows(0, len(rows))
        span = tree_span(trees, cache.lengths, self.target.device)
        start, hidden = self.drafter.enter(rows, trees, span, cache)
        out = self.target.forward(span, cache, self._taps(rows), start, hidden)
        clock.lap("verify")

        outcomes = self._verify(rows, trees, out)
        clock.lap("sample")

        cache.commit([outcome.path for outcome in outcomes])
        for row, tree, outcome in zip(rows, trees, outcomes, strict=True):
            emitted = row.accept(tree, outcome)
            accepted = len(outcome.path) - 1
            row.policy.observe(tree.depth, accepted)
            if row.policy.reads_hidden:
                row.policy.begin_round(out.taps[self.target.num_layers][row.slot, outcome.path[-1]])
            self.drafter.observe(row, tree, outcome.path, out.row(row.slot, len(tree)))
            kept = min(accepted, len(emitted))
            row.stats.rounds.append(Round(tree.drafted, tree.depth, kept, len(emitted), clock.seconds))
        clock.lap("other")

    @staticmethod
    def _verify(rows: list[Request], trees: list[TokenTree], out: PassOutput) -> list[Outcome]:
        greedy = argmax(out.logits) if any(row.plain for row in rows) else []
        return [
            walk(tree, greedy[row.slot]) if row.plain else row.verify(tree, out.logits[row.slot, : len(tree)])
            for row, tree in zip(rows, trees, strict=True)
        ]

    def _taps(self, rows: Sequence[Request]) -> set[int]:
        """What the drafter wants, and the last hidden states where a policy looks at them."""
        last = {self.target.num_layers} if any(row.policy.reads_hidden for row in rows) else set[int]()
        return last.union(self.drafter.taps)

    @property
    def setting(self) -> Setting:
        """What policies may know of where they run."""
        from paceline.profiling.rounds import round_cost

        target, drafter = self.target, self.drafter
        width = target.config.hidden_size if target.has_blocks else None
        cost = partial(round_cost, drafter)
        return Setting(model_key(target), drafter.source, width, drafter.hidden_width, drafter.predictors, cost)

    def _allocate(self, requests: Sequence[Request], batch: int) -> KVCache:
        depth = max(request.policy.limit for request in requests)
        longest = max(request.prompt_length + request.limit for request in requests)
        return self.target.new_cache(batch, longest + self.drafter.max_nodes(depth) + 1)

    def _join(self, request: Request, rows: list[Request], cache: KVCache) -> None:
        started = time.perf_counter()
        request.slot = len(rows)
        own = cache.rows(request.slot, request.slot + 1)
        own.lengths[0] = 0
        # The last prompt token is the first round's root: its pass verifies the first draft as well.
        hidden = self.target.prefill(request.ids[:-1], own, self._taps([request]))
        if request.policy.reads_hidden and len(request.ids) > 1:
            request.policy.begin_round(hidden[self.target.num_layers][-1])
        self.drafter.begin(request, hidden)
        request.stats.prefill_seconds = time.perf_counter() - started
        request.stats.seconds = -started  # the end is added when the request leaves
        rows.append(request)

    def _leave(self, rows: list[Request], cache: KVCache) -> None:
        """Drop the requests that ended; the last row takes the place of each."""
        for request in [row for row in rows if row.finish_reason]:
            request.stats.seconds += time.perf_counter()
            last = rows.pop()
            if last is not request:
                cache.move(last.slot, request.slot)
                self.drafter.move(last.slot, request.slot)
                last.slot = request.slot
                rows[last.slot] = last
