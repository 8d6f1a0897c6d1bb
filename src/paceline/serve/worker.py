"""The thread that owns the model: it steps the engine, and tells waiting handlers what came of it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.decoding.engine import Engine
from paceline.decoding.prefixes import PrefixStore
from paceline.drafters.dispatch import Dispatch
from paceline.errors import OptionError, PacelineError
from paceline.profiling.rounds import measure_drafting
from paceline.serve.memory import Trimmer

if TYPE_CHECKING:
    from paceline.api import LLM
    from paceline.decoding.logprobs import Logprob
    from paceline.decoding.request import Request
    from paceline.decoding.stats import Round
    from paceline.decoding.text import Piece
    from paceline.drafters.prediction import Progress
    from paceline.drafting.tree import TokenTree
    from paceline.serve.metrics import Metrics

log = logging.getLogger("paceline.serve")

LATE = "the server is shutting down, and the answer took too long"


class QueueFull(PacelineError):
    """More requests wait than may."""


class Closing(PacelineError):
    """The server is being shut down."""


class RoundFailed(PacelineError):
    """A round that a request took part in failed."""


class News(NamedTuple):
    """What a round gave one of a job's requests."""

    choice: int
    tokens: list[int]
    sources: list[str]  # who proposed each
    pieces: list[Piece]
    logprobs: list[Logprob]  # of the tokens, if they are asked for
    record: Round | None  # None: the request ended without one
    tree: TokenTree | None
    path: list[int]  # its accepted nodes
    finish_reason: str | None


@dataclass(eq=False)
class Job:
    """What a handler waits for. Its `events` are `News`, or an exception that ends it.

    Attributes:
        make: the requests; called in the worker's thread, since policies may have to measure what passes cost.
        prompts: how many there are.
        choices: requests made for each of them.
    """

    make: Callable[[], list[Request]]
    prompts: int
    choices: int
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[News | Exception] = field(default_factory=asyncio.Queue)
    requests: list[Request] = field(default_factory=list)
    asked: float = field(default_factory=time.perf_counter)
    told: dict[Request, int] = field(default_factory=dict)  # output tokens so far of those that have not ended
    followed: dict[Request, Progress] = field(default_factory=dict)  # of the loop's thread: where predictions stand

    @property
    def count(self) -> int:
        return self.prompts * self.choices

    def tell(self, *events: News | Exception) -> None:
        def put() -> None:
            for event in events:
                self.events.put_nowait(event)

        try:
            self.loop.call_soon_threadsafe(put)
        except RuntimeError:  # the loop is closed: nobody waits any more
            log.debug("nobody waits for an answer")


class Worker:
    """Runs jobs from other threads on one engine.

    Args:
        llms: by name; all on one target, the first is the default. Each brings a drafter.
        rows: most requests decoded at a time.
        context: most tokens of a request, prompt and output.
        most_drafted: most tokens that a policy drafts a round.
        queue: most requests that wait.
        keep: tokens whose keys and values are kept for prompts that begin alike; 0: none.
    """

    def __init__(
        self,
        llms: Mapping[str, LLM],
        *,
        rows: int,
        context: int,
        most_drafted: int,
        queue: int,
        keep: int,
        metrics: Metrics,
    ) -> None:
        self.llms, self.rows, self.context, self.queue, self.metrics = dict(llms), rows, context, queue, metrics
        first = next(iter(llms.values()))
        drafter = Dispatch(first.target, {name: llm.drafter for name, llm in llms.items()})
        slots = context + drafter.max_nodes(most_drafted) + 1
        prefixes = PrefixStore(keep) if keep else None
        self.engine = Engine(first.target, drafter, rows=rows, slots=slots, prefixes=prefixes)
        self.state: list[dict[str, Any]] = []  # of the rows, after the last round
        self._orders: deque[tuple[str, Job]] = deque()
        self._wake = threading.Condition()
        self._pending = 0  # requests accepted and not ended
        self._jobs: list[Job] = []
        self._closing = self._late = False  # late: whoever waits is told that there will be no answer
        self._trimmer = Trimmer()
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)

    # -- from other threads ----------------------------------------------------------------------------------------
    def start(self) -> None:
        """Begin to work, with all the memory that it takes, so that none is missing later."""
        for llm in self.llms.values():
            measure_drafting(llm.drafter)
        self.engine.touch()
        self._thread.start()

    @property
    def ready(self) -> bool:
        return self._thread.is_alive() and not self._closing

    def check_count(self, count: int) -> None:
        """Raises OptionError where so many would not fit if nobody waited."""
        if count > self.rows + self.queue:
            raise OptionError(f"n: {count} answers at once are asked for; here {self.rows + self.queue} at most")

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises:
            QueueFull: too many wait.
            OptionError: it would not fit if nobody waited.
            Closing: `close` has been called.
        """
        with self._wake:
            if self._closing:
                raise Closing("the server is shutting down")
            self.check_count(job.count)
            if self._pending + job.count > self.rows + self.queue:
                raise QueueFull(f"{self.rows} requests are being decoded and {self.queue} wait: try again later")
            self._pending += job.count
            self._orders.append(("add", job))
            self._wake.notify()

    def cancel(self, job: Job) -> None:
        """Give a job up, wherever it is; one that ended is left alone."""
        with self._wake:
            self._orders.append(("cancel", job))
            self._wake.notify()

    def close(self, timeout: float | None = None) -> None:
        """Take no more jobs, finish those there are, and end the thread; what has not ended by then is given up, and
        whoever waits for it is told `Closing`.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._late = True  # before the jobs are looked at: one that joins them later finds it set
            for job in list(self._jobs):
                job.tell(Closing(LATE))
                self.cancel(job)
            self._thread.join()

    # -- in the engine's thread ------------------------------------------------------------------------------------
    def _run(self) -> None:
        pause: float | None = None
        while True:
            with self._wake:
                while not self._orders and self.engine.idle and not self._closing:
                    if not self._wake.wait(pause):  # what was freed is to be given back
                        break
                orders, closing = list(self._orders), self._closing
                self._orders.clear()
            for order, job in orders:
                self._safely(self._add if order == "add" else self._give_up, job)
            worked = not self.engine.idle
            if worked:
                self._safely(self._step)
            elif closing:
                break
            self._show()
            pause = self._trimmer.tidy(worked or bool(orders))

    def _safely(self, work: Callable[..., None], *given: Job) -> None:
        """Whatever goes wrong, the thread lives on: who waits is told, and what comes later is decoded."""
        try:
            work(*given)
        except Exception as error:
            log.exception("the engine failed")
            for job in dict.fromkeys([*given, *self._jobs]):
                job.tell(RoundFailed(f"the engine failed: {type(error).__name__}"))
                with suppress(Exception):
                    self._give_up(job)

    def _add(self, job: Job) -> None:
        try:
            job.requests = job.make()
            for request in job.requests:
                self.engine.add(request)
        except Exception as error:
            if not isinstance(error, PacelineError):
                log.exception("a request could not be made")
                error = RoundFailed(f"the request could not be made: {type(error).__name__}")
            for request in job.requests:
                self.engine.cancel(request)
            self._free(job.count)
            job.tell(error)
            return
        job.told = dict.fromkeys(job.requests, 0)
        self._jobs.append(job)
        if self._late:
            job.tell(Closing(LATE))
            self._give_up(job)

    def _give_up(self, job: Job) -> None:
        if job not in self._jobs:
            return
        self._jobs.remove(job)
        self._free(len(job.told))
        self.metrics.aborted(job.told)
        for request in job.told:
            self.engine.cancel(request)

    def _step(self) -> None:
        began = time.perf_counter()
        try:
            self.engine.step()
        except Exception as error:  # all that took part have ended; if none has, the engine cannot go on
            log.exception("a round failed")
            failure = RoundFailed(f"a round failed: {type(error).__name__}")
            ended = [job for job in self._jobs if any(request.finish_reason for request in job.told)]
            for job in ended or list(self._jobs):
                job.tell(failure)
                self._give_up(job)
            return
        self.metrics.step(time.perf_counter() - began)
        for job in list(self._jobs):
            try:
                self._report(job)
            except Exception as error:
                log.exception("an answer could not be told")
                job.tell(RoundFailed(f"the answer could not be told: {type(error).__name__}"))
                self._give_up(job)

    def _report(self, job: Job) -> None:
        """Tell a job what its requests were given."""
        news: list[News | Exception] = []
        for index, request in enumerate(job.requests):
            if request not in job.told:
                continue
            if request.error:
                failure = request.error
                if not isinstance(failure, PacelineError):
                    log.error("a prompt could not be read", exc_info=failure)
                    failure = RoundFailed(f"the prompt could not be read: {type(failure).__name__}")
                job.tell(failure)
                self._give_up(job)
                return
            told, done = job.told[request], request.finish_reason is not None
            if fresh := request.ids[request.prompt_length + told :]:
                self.metrics.round(request, job.asked, first=told == 0)
                job.told[request] += len(fresh)
            if fresh or done:
                news.append(_news(index, request, told, fresh))
            if done:
                del job.told[request]
                self._free(1)
                self.metrics.finished(request, job.asked)
        if not job.told:
            self._jobs.remove(job)
        if news:
            job.tell(*news)

    def _free(self, count: int) -> None:
        with self._wake:
            self._pending -= count

    def _show(self) -> None:
        """Bring what others see up to date."""
        running = self.engine.running
        self.state = [_state(request) for request in running]
        self.metrics.load(len(running), self._pending - len(running), self._used(running), self.engine.prefixes)

    def _used(self, running: Sequence[Request]) -> float:
        rows, slots = self.engine.capacity
        return sum(len(request.ids) for request in running) / (rows * slots)


def _news(index: int, request: Request, told: int, fresh: list[int]) -> News:
    """Taken in the engine's thread: what it refers to does not change any more."""
    tree, path = request.last or (None, [])
    return News(
        index,
        fresh,
        request.stats.sources[told:],
        request.read(),
        request.logprobs[told:],
        request.stats.rounds[-1] if request.stats.rounds else None,
        tree,
        path,
        request.finish_reason,
    )


def _state(request: Request) -> dict[str, Any]:
    """A row as `/slots` shows it: no text, which may be another's."""
    stats = request.stats
    return {
        "id": request.slot,
        "is_processing": True,
        "drafter": request.drafter,
        "prompt_tokens": request.prompt_length,
        "reused_tokens": stats.reused_tokens,
        "tokens": stats.tokens,
        "max_tokens": request.limit,
        "rounds": len(stats.rounds),
        "tau": stats.tau,
    }
