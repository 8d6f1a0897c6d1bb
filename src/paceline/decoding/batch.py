"""The rows of an engine's cache: which request has which, whose prompt is being read, who waits."""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import torch

from paceline.clock import now
from paceline.decoding.leading import leads, take_lead
from paceline.decoding.reading import Reading
from paceline.decoding.request import CANCELLED, FAILED, NO_ROW, Request
from paceline.drafting.stopwatch import Stopwatch
from paceline.errors import ContextOverflow, OptionError, require
from paceline.targets.target import PREFILL_CHUNK

if TYPE_CHECKING:
    from paceline.decoding.prefixes import PrefixStore
    from paceline.drafting.base import Drafter
    from paceline.targets.cache import KVCache
    from paceline.targets.target import Target

log = logging.getLogger("paceline")

Batch = TypeVar("Batch", bound="RunningBatch")
Given = ParamSpec("Given")
Result = TypeVar("Result")


def in_turn(
    method: Callable[Concatenate[Batch, Given], Result],
) -> Callable[Concatenate[Batch, Given], Result]:
    """A method that waits until no other thread uses the target."""

    @wraps(method)
    def waits(self: Batch, /, *given: Given.args, **named: Given.kwargs) -> Result:
        with self.target.turns:
            return method(self, *given, **named)

    return waits


class RunningBatch:
    """Requests that wait, the one whose prompt is being read, and those that decode, in rows `0, 1, …` of the cache.
    For the arguments see `Engine`.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        rows: int | None = None,
        slots: int | None = None,
        prefixes: PrefixStore | None = None,
    ) -> None:
        require((rows is None) == (slots is None), "an engine is given both rows and slots, or neither")
        require(
            not (target.chains_only and drafter.needs_trees),
            f"{drafter.source} drafts trees, and {target.name} reads chains only: choose another drafter",
        )
        self.target, self.drafter, self.prefixes = target, drafter, prefixes
        self._kept_taps = drafter.kept_taps
        self._reading: Reading | None = None  # whose prompt is being read
        self._rows: list[Request] = []  # decoding; a request's slot is its index
        self._waiting: deque[Request] = deque()
        self._cache: KVCache | None = None
        self._followed = False  # whether the drafter's buffers are made for this cache
        self._fixed, self._runs = rows is not None, 0
        self._in_step, self._to_cancel = False, list[Request]()
        self._ended = 0.0  # when the last step did
        self._between = Stopwatch()  # from there to the next, while there is something to decode
        if rows is not None and slots is not None:
            require(min(rows, slots) >= 1, f"an engine has at least 1 row and 1 slot, not {rows} and {slots}")
            self._allocate(rows, slots)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return self.resting and not self._waiting

    @property
    def resting(self) -> bool:
        """Whether its cache holds nothing that is needed."""
        return not self._rows and self._reading is None

    @property
    def busy(self) -> bool:
        """Whether it decodes, or has runs that will go on: they rest between the batches of their requests."""
        return not self.resting or self._runs > 0

    @property
    def running(self) -> Sequence[Request]:
        """Those that decode, by row."""
        return self._rows

    @property
    def capacity(self) -> tuple[int, int]:
        """Rows and slots of the cache; 0 while there is none."""
        return (0, 0) if self._cache is None else (self._cache.batch, self._cache.capacity)

    def slots(self, *requests: Request) -> int:
        """Slots that each row needs for these to decode side by side: the longest prompt and output, and the largest
        draft of a round, to whose width the others are padded.
        """
        longest = max(request.prompt_length + request.limit for request in requests)
        return longest + max(self.drafter.max_nodes(request.policy.limit) for request in requests) + 1

    @in_turn
    @torch.inference_mode()
    def cancel(self, *requests: Request) -> None:
        """End requests here and now, whether they wait or decode; their rows are free. Those that ended are left alone.

        Amidst a step they end with it: its rows must stay where they are. So asks whoever the step calls, such as a
        logits processor, and Python when it closes a forgotten run.
        """
        if self._in_step:
            self._to_cancel += requests
            return
        decoding = []
        for request in requests:
            request.finish_reason = request.finish_reason or CANCELLED
            if request in self._rows:
                decoding.append(request)
            elif self._reading and self._reading.request is request:
                self._reading = None
            elif request in self._waiting:
                self._waiting.remove(request)
        self._leave_all(decoding)
        self._release()

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Rows stay where they are; what is cancelled meanwhile ends afterwards."""
        require(not self._in_step, "an engine takes one step at a time: do not decode with it in a callback of its own")
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False
            if self._to_cancel:
                cancelled, self._to_cancel = self._to_cancel, []
                self.cancel(*cancelled)

    # -- the cache -------------------------------------------------------------------------------------------------
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
        if rows and too_small and self.resting and not self._fixed:
            self._allocate(rows, slots)

    @torch.inference_mode()
    def _allocate(self, rows: int, slots: int) -> None:
        self._cache = None  # what there was is free before there is more
        try:
            self._cache, self._followed = self.target.new_cache(rows, slots), False
        except (MemoryError, OSError, RuntimeError) as error:
            if not _lacks_memory(error):
                raise
            raise OptionError(
                f"no memory for the KV cache of {rows} rows of {slots} tokens: take fewer rows or a shorter context"
            ) from error

    @in_turn
    @torch.inference_mode()
    def touch(self) -> None:
        """Have the system give all of the cache's memory now, and that of the prefixes: it comes when first written."""
        for tensor in self._allocated.tensors:
            tensor.add_(0)
        if self.prefixes:
            self.prefixes.allocate(self._allocated)

    def _release(self) -> None:
        """Give the cache back, when nobody needs it and it may be of another size next time."""
        if self.idle and not self._fixed and not self._runs and not self._in_step:
            self._cache = None

    def _lead(self) -> None:
        """Have the drafter follow this engine's cache, unless it does already."""
        if not (self._followed and leads(self, self.drafter)):
            take_lead(self, self.drafter)
            self._start_drafter(self._allocated)
            self._followed = True

    def _start_drafter(self, cache: KVCache) -> None:
        self.drafter.start(cache)

    # -- prompts ---------------------------------------------------------------------------------------------------
    def _admit(self) -> None:
        """Read as much of prompts as a step may, and let those join that are read."""
        if self._waiting and self.resting:
            self._make_room(len(self._waiting), self.slots(*self._waiting))
            self._lead()
        left = PREFILL_CHUNK
        while (reading := self._reading or self._next()) and reading.chunk <= left:
            left -= reading.chunk
            try:
                self._read(reading)
            except Exception as error:
                self._reading = None
                _refuse(reading.request, error)
            except BaseException:
                self.cancel(reading.request)
                raise

    def _next(self) -> Reading | None:
        """The next of those that wait, when there is a row for it."""
        while self._waiting and (row := len(self._rows)) < self._allocated.batch:
            if self.slots(self._waiting[0], *self._rows) > self._allocated.capacity:
                return None  # those that came later wait with it
            request, own = self._waiting.popleft(), self._allocated.rows(row, row + 1)
            try:
                taps = self._taps([request], self.drafter.prompt_taps)
                self._reading = Reading(self.target, request, row, own, taps, self._kept_taps, self.prefixes)
                return self._reading
            except Exception as error:
                _refuse(request, error)
        return None

    def _read(self, reading: Reading) -> None:
        """A chunk of a prompt. After the last one the request joins: the prompt's last token is the first round's
        root, whose pass verifies the first draft as well.
        """
        reading.read()
        if reading.left:
            return
        request, hidden = reading.request, reading.hidden()
        request.slot = len(self._rows)
        if reading.row != request.slot:  # rows before it have ended meanwhile
            self._allocated.move(reading.row, request.slot)
        if request.policy.reads_hidden and len(request.ids) > 1:
            request.policy.begin_round(hidden[self.target.num_layers][-1])
        began = now()
        self.drafter.begin(request, hidden)
        request.stats.prefill_seconds += now() - began
        if self.prefixes:
            self.prefixes.begin(request, {tap: hidden[tap] for tap in self._kept_taps})
        self._rows.append(request)
        self._reading = None

    def _leave_all(self, requests: Sequence[Request], whole: bool = True) -> None:
        """Drop these rows, of a round that was a `whole` one, even where the drafter fails at one of them."""
        failed: Exception | None = None
        for request in sorted(requests, key=lambda one: -one.slot):  # from the back: rows that end are not moved first
            try:
                self._leave(request, whole)
            except Exception as error:
                failed = failed or error
        if failed:
            raise failed

    def _leave(self, request: Request, whole: bool) -> None:
        """Drop a row, of a round that was a `whole` one; the last row takes its place."""
        request.stats.seconds = now() - request.joined
        try:
            if self.prefixes:
                self._keep_text(request, whole)
            self.drafter.end(request)
        finally:
            self._vacate(request)

    def _keep_text(self, request: Request, whole: bool) -> None:
        assert self.prefixes
        if not whole:
            return self.prefixes.drop(request)
        try:
            self.prefixes.end(request, self._allocated.rows(request.slot, request.slot + 1))
        except Exception:  # of no account to the request
            log.warning("a text could not be kept for prompts that begin like it", exc_info=True)

    def _vacate(self, request: Request) -> None:
        """Free a row; the last row takes its place."""
        free, request.slot, last = request.slot, NO_ROW, self._rows.pop()
        if last is request:
            return
        source, last.slot, self._rows[free] = last.slot, free, last
        self._allocated.move(source, free)
        self.drafter.move(source, free)

    def _taps(self, rows: Sequence[Request], wanted: Collection[int]) -> set[int]:
        """What the drafter has `wanted`, and the last hidden states where a policy looks at them."""
        last = {self.target.num_layers} if any(row.policy.reads_hidden for row in rows) else set[int]()
        return last.union(wanted)


def _lacks_memory(error: Exception) -> bool:
    """As the system says it, Python, or torch, which has no error of its own for it on a CPU."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    return known or "allocate memory" in str(error)


def _refuse(request: Request, error: Exception) -> None:
    request.error, request.finish_reason, request.slot = error, FAILED, NO_ROW
