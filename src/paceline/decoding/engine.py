"""The engine: rounds of drafting and verifying over a batch of requests that come and go."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch

from paceline.decoding.request import CANCELLED, FAILED, NO_ROW, Request
from paceline.decoding.stats import Clock, Round
from paceline.decoding.verify import Outcome, verify
from paceline.drafting.tree import TokenTree, tree_span
from paceline.errors import ContextOverflow, require
from paceline.targets.costs import known_costs

if TYPE_CHECKING:
    from paceline.drafting.base import Drafter
    from paceline.targets.cache import KVCache
    from paceline.targets.span import Span
    from paceline.targets.target import PassOutput, Target


#: Which engine each drafter was last made to follow: its buffers are made for one cache.
_leaders: WeakKeyDictionary[Drafter, ref[Engine]] = WeakKeyDictionary()


class Emitted(NamedTuple):
    """What a round gave one request."""

    request: Request
    tokens: list[int]


class Engine:
    """Runs requests on a target with a drafter. Requests may join and leave between rounds; what each of them gets does
    not depend on the others. Not thread-safe.

    Args:
        rows: most requests decoded at a time.
        slots: tokens of the KV cache for each of them; see `slots`. With `rows` and `slots` the cache is allocated
            once, and a request that could never fit is refused. With neither, requests that do not fit wait until the
            others have ended, and the cache is then made anew for all that wait.

    Raises:
        OptionError: only one of `rows` and `slots`, or one below 1; or a drafter that needs trees on a target that
            reads chains only.
    """

    def __init__(self, target: Target, drafter: Drafter, *, rows: int | None = None, slots: int | None = None) -> None:
        require((rows is None) == (slots is None), "an engine is given both rows and slots, or neither")
        require(
            not (target.chains_only and drafter.needs_trees),
            f"{drafter.source} drafts trees, and {target.name} reads chains only: choose another drafter",
        )
        self.target, self.drafter = target, drafter
        self._rows: list[Request] = []  # decoding; a request's slot is its index
        self._waiting: deque[Request] = deque()
        self._cache: KVCache | None = None
        self._followed = False  # whether the drafter's buffers are made for this cache
        self._fixed, self._runs = rows is not None, 0
        if rows is not None and slots is not None:
            require(min(rows, slots) >= 1, f"an engine has at least 1 row and 1 slot, not {rows} and {slots}")
            self._allocate(rows, slots)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._rows and not self._waiting

    def slots(self, request: Request) -> int:
        """Slots of the KV cache that a request needs: its prompt, its output and the largest draft of a round."""
        return request.prompt_length + request.limit + self.drafter.max_nodes(request.policy.limit) + 1

    # -- requests come and go --------------------------------------------------------------------------------------
    def add(self, request: Request) -> None:
        """Let a request join, after those that wait already, as soon as there is a row.

        Raises:
            ContextOverflow: it does not fit the model's context, or a row of this engine's cache.
            OptionError: it has been decoded, or is being decoded.
        """
        self._check(request)
        request.slot = NO_ROW
        self._waiting.append(request)

    @torch.inference_mode()
    def cancel(self, request: Request) -> None:
        """End a request here and now, whether it waits or decodes; its row is free. One that ended is left alone."""
        request.finish_reason = request.finish_reason or CANCELLED
        if request in self._rows:
            self._leave(request)
        elif request in self._waiting:
            self._waiting.remove(request)

    @torch.inference_mode()
    def step(self) -> list[Emitted]:
        """One round: requests that wait join where there is a row, all are decoded, and those that ended leave.

        A request whose prompt cannot be read ends with the reason "error", and its `error` says why. A round that
        fails ends all requests that took part in it, since nobody knows how far each of them came.

        Returns:
            What each row was given, in no particular order; nothing when the engine is idle.

        Raises:
            OptionError: another engine is decoding with this engine's drafter.
        """
        self._admit()
        try:
            emitted = self._round(self._rows) if self._rows else []
        except BaseException:
            for request in self._rows[::-1]:
                self.cancel(request)
            raise
        for request, _ in reversed(emitted):  # from the back: rows that end are not moved first
            if request.finish_reason:
                self._leave(request)
        self._release()
        return emitted

    def run(self, requests: Sequence[Request], batch: int | None = None) -> Iterator[Request]:
        """Continue the requests, at most `batch` of them at a time; yields each after every round it took part in.

        Runs may take turns with one another, and with `step`. What has not ended when one is given up is cancelled.

        Raises:
            ContextOverflow: before anything is computed, when a request does not fit.
            OptionError: when `batch` is below 1, or a request has been decoded.
        """
        require(batch is None or batch >= 1, f"batch must be at least 1, not {batch}")
        for request in requests:
            self._check(request)
        to_come, going = deque(requests), dict[Request, int]()  # rounds of each that have been told
        batch = min(batch or len(requests), len(requests))
        self._runs += 1
        try:
            self._make_room(batch, max(map(self.slots, requests), default=0))
            while to_come or going:
                while to_come and len(going) < batch:
                    going[to_come[0]] = 0
                    self.add(to_come.popleft())
                if not any(len(request.stats.rounds) > told or request.error for request, told in going.items()):
                    self.step()
                for request, told in list(going.items()):
                    if len(request.stats.rounds) > told:
                        going[request] = len(request.stats.rounds)
                        yield request
                    if request.error:
                        raise request.error
                    if request.finish_reason:
                        del going[request]
        finally:
            for request in going:
                self.cancel(request)
            self._runs -= 1
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
        out = self.target.forward(span, cache, self._taps(rows), start, hidden)
        clock.lap("verify")

        outcomes = verify(rows, trees, out.logits)
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
        self._learn_costs(trees, span, start, clock.seconds)
        return emitted

    def _learn_costs(self, trees: Sequence[TokenTree], span: Span, start: int, seconds: Mapping[str, float]) -> None:
        """What this round took, told to those who count on it: costs of whole passes, and of this drafter's rounds."""
        after_draft = seconds["verify"] + seconds["sample"] + seconds["other"]
        passes, rounds = known_costs(self.target), known_costs(self.drafter)
        if passes and start == 0:
            passes.observe(span.batch * span.width, after_draft, float(span.starts.mean()), span.batch)
        if rounds and len(trees) == 1:
            rounds.observe(trees[0].depth, seconds["draft"] + after_draft)

    def _accept(self, row: Request, tree: TokenTree, outcome: Outcome, out: PassOutput) -> list[int]:
        """Tell the request, its policy and the drafter what became of a tree; returns the tokens that were output."""
        tokens = row.accept(tree, outcome)
        row.policy.observe(tree.depth, len(outcome.path) - 1)
        if row.policy.reads_hidden:
            row.policy.begin_round(out.taps[self.target.num_layers][row.slot, outcome.path[-1]])
        self.drafter.observe(row, tree, outcome.path, out.row(row.slot, len(tree)))
        return tokens

    def _taps(self, rows: Sequence[Request]) -> set[int]:
        """What the drafter wants, and the last hidden states where a policy looks at them."""
        last = {self.target.num_layers} if any(row.policy.reads_hidden for row in rows) else set[int]()
        return last.union(self.drafter.taps)

    # -- rows ------------------------------------------------------------------------------------------------------
    @property
    def _allocated(self) -> KVCache:
        assert self._cache is not None
        return self._cache

    def _check(self, request: Request) -> None:
        self.target.check_fits(request.prompt_length, request.limit)
        require(request.is_new, "a request can be decoded once: make a new one")
        if self._fixed and (needed := self.slots(request)) > self._allocated.capacity:
            raise ContextOverflow(
                f"a prompt of {request.prompt_length} tokens + {request.limit} new tokens + a draft need {needed} "
                f"slots of the KV cache; this engine's rows have {self._allocated.capacity}"
            )

    def _make_room(self, rows: int, slots: int) -> None:
        """A cache of this size at least, if there is none and nothing would be lost."""
        too_small = self._cache is None or self._cache.batch < rows or self._cache.capacity < slots
        if rows and too_small and not self._rows and not self._fixed:
            self._allocate(rows, slots)

    @torch.inference_mode()
    def _allocate(self, rows: int, slots: int) -> None:
        self._cache = None  # what there was is free before there is more
        self._cache, self._followed = self.target.new_cache(rows, slots), False

    def _release(self) -> None:
        """Give the cache back, when nobody needs it and it may be of another size next time."""
        if self.idle and not self._fixed and not self._runs:
            self._cache = None

    def _lead(self) -> None:
        """Have the drafter follow this engine's cache, unless it does already."""
        other = _leaders.get(self.drafter, lambda: None)()
        if other is self and self._followed:
            return
        require(
            other is None or not other._rows or other is self,
            "another engine is decoding with this drafter: wait until it is done, or make a drafter for each engine",
        )
        self._start_drafter(self._allocated)
        _leaders[self.drafter], self._followed = ref(self), True

    def _start_drafter(self, cache: KVCache) -> None:
        self.drafter.start(cache)

    def _admit(self) -> None:
        if self._waiting and not self._rows:
            self._make_room(len(self._waiting), max(map(self.slots, self._waiting)))
            self._lead()
        while self._waiting and len(self._rows) < self._allocated.batch:
            if self.slots(self._waiting[0]) > self._allocated.capacity:
                break  # those that came later wait with it
            request = self._waiting.popleft()
            try:
                self._join(request)
            except Exception as error:
                request.error, request.finish_reason, request.slot = error, FAILED, NO_ROW
            except BaseException:
                self.cancel(request)
                raise

    def _join(self, request: Request) -> None:
        request.joined = time.perf_counter()
        request.slot = len(self._rows)
        own = self._allocated.rows(request.slot, request.slot + 1)
        own.clear()
        # The last prompt token is the first round's root: its pass verifies the first draft as well.
        hidden = self.target.prefill(request.ids[:-1], own, self._taps([request]))
        if request.policy.reads_hidden and len(request.ids) > 1:
            request.policy.begin_round(hidden[self.target.num_layers][-1])
        self.drafter.begin(request, hidden)
        request.stats.prefill_seconds = time.perf_counter() - request.joined
        self._rows.append(request)

    def _leave(self, request: Request) -> None:
        """Drop a row; the last one takes its place."""
        request.stats.seconds = time.perf_counter() - request.joined
        last = self._rows.pop()
        if last is not request:
            self._allocated.move(last.slot, request.slot)
            self.drafter.move(last.slot, request.slot)
            last.slot = request.slot
            self._rows[last.slot] = last
        request.slot = NO_ROW
