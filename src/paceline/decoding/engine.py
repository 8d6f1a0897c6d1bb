"""The engine: rounds of drafting and verifying over a batch of requests that come and go."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.clock import now
from paceline.decoding.batch import RunningBatch, in_turn
from paceline.decoding.request import CANCELLED, NO_ROW, Request
from paceline.decoding.sampling import whole_number
from paceline.decoding.stats import Clock, Round
from paceline.decoding.verify import NEEDING_NO_LOGITS, Outcome, verify
from paceline.drafting.tree import TokenTree, tree_span
from paceline.errors import require
from paceline.targets.costs import known_costs

if TYPE_CHECKING:
    from paceline.targets.span import Span
    from paceline.targets.target import PassOutput


class Emitted(NamedTuple):
    """What a round gave one request."""

    request: Request
    tokens: list[int]


class Engine(RunningBatch):
    """Runs requests on a target with a drafter. Requests may join and leave between rounds; what each of them gets does
    not depend on the others. Threads may share an engine, and engines a target: they take turns, a round each.

    Args:
        rows: most requests decoded at a time.
        slots: tokens of the KV cache for each of them; see `slots`. With `rows` and `slots` the cache is allocated
            once, and a request that could never fit is refused. With neither, requests that do not fit wait until the
            others have ended, and the cache is then made anew for all that wait.
        prefixes: keeps the keys and values of requests that ended, for prompts that begin alike.

    Raises:
        OptionError: only one of `rows` and `slots`, or one below 1; or a drafter that needs trees on a target that
            reads chains only.
    """

    # -- requests come and go --------------------------------------------------------------------------------------
    @in_turn
    def add(self, request: Request) -> None:
        """Let a request join, after those that wait already, as soon as there is a row.

        Raises:
            ContextOverflow: it does not fit the model's context, or a row of this engine's cache.
            OptionError: it has been decoded, or is being decoded.
        """
        self._check(request)
        request.border = self.target.border
        request.slot = NO_ROW
        self._waiting.append(request)

    @in_turn
    @torch.inference_mode()
    def step(self) -> list[Emitted]:
        """One round: requests that wait join where there is a row, all are decoded, and those that ended leave.

        No more of prompts is read than one chunk (`PREFILL_CHUNK` tokens), so that those that decode keep moving.
        A request whose prompt cannot be read ends with the reason "error", and its `error` says why. A round that
        fails ends all requests that took part in it, since nobody knows how far each of them came; their
        `error` is what it failed with.

        Returns:
            What each row was given, in no particular order; nothing when the engine is idle.

        Raises:
            OptionError: another engine is decoding with this engine's drafter; or this one is amidst a step, of which
                the caller is a part, as a logits processor is.
        """
        with self._stepping():
            emitted = self._step()
        self._release()
        self._ended = now()
        return emitted

    def _step(self) -> list[Emitted]:
        self._learn_between()
        self._admit()
        try:
            emitted = self._round(self._rows) if self._rows else []
        except BaseException as error:
            for request in self._rows:
                request.finish_reason = request.finish_reason or CANCELLED
                if isinstance(error, Exception):  # the runs that did not call this step raise it, too
                    request.error = request.error or error
            with suppress(Exception):  # of a drafter that fails at their end as well
                self._leave_all(self._rows, whole=False)
            raise
        self._leave_all([request for request, _ in emitted if request.finish_reason])
        return emitted

    def run(self, requests: Sequence[Request], batch: int | None = None) -> Iterator[Request]:
        """Continue the requests, at most `batch` of them at a time; yields each after every round it took part in.

        Runs may take turns with one another, and with `step`. What has not ended when one is given up is cancelled.

        Raises:
            ContextOverflow: before anything is computed, when a request does not fit.
            OptionError: when `batch` is below 1, or a request has been decoded.
        """
        running = self._run(requests, batch)
        at_exit = sys.is_finalizing  # kept here: when the program ends, modules are emptied before this may be closed
        try:
            while True:
                with self.target.turns:
                    request = next(running, None)
                if request is None:
                    return
                yield request
        finally:
            if not at_exit():
                with self.target.turns:
                    running.close()

    def _run(self, requests: Sequence[Request], batch: int | None) -> Generator[Request, None, None]:
        batch = whole_number("batch", batch, none=True)
        require(batch is None or batch >= 1, f"batch must be at least 1, not {batch}")
        for request in requests:
            self._check(request)
        to_come, going = deque(requests), dict[Request, int]()  # rounds of each that have been told
        batch = min(batch or len(requests), len(requests))
        at_exit = sys.is_finalizing  # as in `run`
        self._runs += 1
        try:
            self._make_room(batch, self.slots(*requests) if requests else 0)
            while to_come or going:
                while to_come and len(going) < batch:
                    if (request := to_come.popleft()).finish_reason == CANCELLED:
                        continue
                    going[request] = 0
                    self.add(request)
                if not any(len(request.stats.rounds) > told or request.error for request, told in going.items()):
                    self.step()
                for request, told in list(going.items()):
                    if len(request.stats.rounds) > told:
                        going[request] = len(request.stats.rounds)
                        yield request
                    if request.error:
                        raise request.error
                    if request.finish_reason and len(request.stats.rounds) == going[request]:  # others may have stepped
                        del going[request]
        finally:
            if not at_exit():
                self._runs -= 1
                try:
                    self.cancel(*going)
                finally:
                    self._release()

    # -- one round -------------------------------------------------------------------------------------------------
    def _round(self, rows: list[Request]) -> list[Emitted]:
        clock = Clock()
        trees = self.drafter.draft(rows)
        if self.target.chains_only:
            trees = [tree.best_chain() for tree in trees]
        clock.lap("draft")

        cache = self._allocated.rows(0, len(rows))
        span = tree_span(trees, cache.lengths, self.target.device)
        start, hidden = self.drafter.enter(rows, trees, span, cache)
        taps = self._taps(rows, self.drafter.taps)
        if start and min(taps, default=start) < start:  # of another drafter: only a whole pass comes by there
            start, hidden = 0, None
        forward = self.target.forward if self._needs_logits(rows, trees) else self.target.forward_greedy
        out = forward(span, cache, taps, start, hidden)
        clock.lap("verify")

        outcomes = verify(rows, trees, out, self.target.draw)
        clock.lap("sample")

        cache.commit([outcome.path for outcome in outcomes])
        emitted = [
            Emitted(row, self._accept(row, tree, outcome, out))
            for row, tree, outcome in zip(rows, trees, outcomes, strict=True)
        ]
        clock.lap("other")
        for (row, tokens), tree, outcome in zip(emitted, trees, outcomes, strict=True):
            accepted = min(len(outcome.path) - 1, len(tokens))
            row.stats.rounds.append(Round(tree.drafted, tree.depth, accepted, len(tokens), clock.seconds))
        self._learn_costs(rows, trees, span, start, clock.seconds)
        return emitted

    def _needs_logits(self, rows: Sequence[Request], trees: Sequence[TokenTree]) -> bool:
        """Whether more than the likeliest token of each node will be looked at."""
        pairs = zip(rows, trees, strict=True)
        return self.drafter.reads_logits or any(
            row.top is not None or row.verification(tree) not in NEEDING_NO_LOGITS for row, tree in pairs
        )

    def _learn_costs(
        self, rows: Sequence[Request], trees: Sequence[TokenTree], span: Span, start: int, seconds: Mapping[str, float]
    ) -> None:
        """What this round took, told to those who count on it: costs of whole passes, and of a drafter's rounds."""
        after_draft = seconds["verify"] + seconds["sample"] + seconds["other"]
        passes = known_costs(self.target, all(row.plain and row.stop_when is None for row in rows))
        if passes and start == 0:
            width = span.tokens if self.target.packs else span.batch * span.width
            passes.observe(width, after_draft, sum(span.starts.tolist()) / span.batch, span.batch)
        drafter = self.drafter.drafted_for(rows[0], trees[0]) if len(trees) == 1 else None
        depth, forwards = trees[0].depth, drafter.forwards if drafter else None
        drafted = not depth or forwards != 0  # else it was copied
        if drafter and drafted and (rounds := known_costs(drafter, rows[0].plain)):
            # A forward that gave no token is not of a round of this length.
            drafting = seconds["draft"] * (depth / forwards if forwards else 1.0)
            rounds.observe(depth, drafting + after_draft)

    def _learn_between(self) -> None:
        """What passed since the last step, which left something to decode."""
        if self._rows:
            self._between.learn(now() - self._ended)
            for plain in (True, False):
                if passes := known_costs(self.target, plain):
                    passes.between = self._between.seconds

    def _accept(self, row: Request, tree: TokenTree, outcome: Outcome, out: PassOutput) -> list[int]:
        """Tell the request, its policy and the drafter what became of a tree; returns the tokens that were output."""
        tokens = row.accept(tree, outcome)
        read = out.row(row.slot, len(tree))
        if row.top is not None:
            row.record(read.logits[outcome.path[: len(tokens)]], tokens)
        if self.prefixes:
            self.prefixes.extend(row, {tap: read.taps[tap][outcome.path] for tap in self._kept_taps})
        if asked_for := self.drafter.asked_for(row, tree, outcome.path):
            row.policy.observe(*asked_for)
        if row.policy.reads_hidden:
            row.policy.begin_round(read.taps[self.target.num_layers][outcome.path[-1]])
        self.drafter.observe(row, tree, outcome.path, read)
        return tokens
