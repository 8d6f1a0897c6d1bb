"""A step of vLLM's as a round of paceline's: what came of the last drafts, and the next ones."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Integer

from paceline.drafting.budget import Calibration
from paceline.drafting.tree_drafter import reach
from paceline.errors import PacelineError, first_line, require
from paceline.integrations.vllm.lengths import Lengths, learn, path_probabilities
from paceline.integrations.vllm.rows import ContentRows, NamedRows, VLLMRow, new_row
from paceline.integrations.vllm.settings import MOST_DRAFTED, PAD, ProposalSource, VLLMSettings, new_policy
from paceline.policies.base import Setting, StoppingPolicy

if TYPE_CHECKING:
    from paceline.integrations.vllm.states import States

OPTION = "paceline_policy"  # of a request, in `vllm_xargs`
OFF = "fixed:k=0"
SAID, LONG = 8, 300  # errors of one kind that are logged, and letters of each: clients choose some of the words
WIDER = 4  # nodes of a tree, of which a path is taken, as a multiple of the most tokens of a path

log = logging.getLogger("paceline")


class Rounds:
    """Drafts for the requests of one engine, a step at a time.

    Args:
        source: what drafts.
        clock: seconds.

    Attributes:
        states: of vLLM's model, where the source has a guide that reads them.
    """

    states: States | None = None

    def __init__(
        self, source: ProposalSource, settings: VLLMSettings, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.source, self.settings, self._clock = source, settings, clock
        self.rows: ContentRows | NamedRows = ContentRows()
        self.lengths = Lengths(settings.most, settings.mode, settings.worth)
        greedy = Calibration()
        self._calibrations = {False: greedy, True: Calibration(greedy, tells=False)}  # of requests that sample apart
        self._before: dict[bool, dict[type, StoppingPolicy]] = {False: {}, True: {}}  # likewise; see `Setting.before`
        self._step, self._ended, self._count = 0, 0.0, 1
        self._logged: defaultdict[tuple[str, type], set[str]] = defaultdict(set)  # lines, by kind
        self._most_drafted = max(MOST_DRAFTED, settings.most)  # for requests that choose
        usual = self._policy(source.policy)  # an unknown one is an error now
        self._most_drafted = max(self._most_drafted, usual.limit)

    def propose(
        self, sampled: Sequence[list[int]], lengths: Integer[np.ndarray, " rows"], tokens: np.ndarray
    ) -> list[list[int]]:
        """A draft for each row of the batch; the arguments are those of `ContentRows.find`."""
        try:
            return self._round(sampled, lengths, tokens)
        finally:
            self._ended = self._clock()

    def _round(
        self, sampled: Sequence[list[int]], lengths: Integer[np.ndarray, " rows"], tokens: np.ndarray
    ) -> list[list[int]]:
        now = self._clock()
        rows = self.rows.find(sampled, lengths, tokens, self._begin)
        self._outcome(rows, sampled, now)
        self._tell_states(rows, sampled)
        self._step += 1
        live = [row for row in rows if row is not None]
        for row in live:
            row.step = self._step
            row.room = max(min(self.settings.most, self.settings.max_model_len - len(row.ids) - 1), 0)
        self._count = len(live)
        drafts = iter(self._drafts(live))
        answer = [next(drafts) if row is not None else [] for row in rows]
        self.rows.forget(self._step)
        return answer

    def log_once(self, what: str, error: BaseException) -> None:
        """Say what went wrong, the first time that it does; of one kind no more than a few."""
        said, line = self._logged[what, type(error)], first_line(error)[:LONG]
        if line not in said and len(said) < SAID:
            said.add(line)
            log.warning("vLLM: %s: %s", what, line, exc_info=None if isinstance(error, PacelineError) else error)

    # -- requests --------------------------------------------------------------------------------------------------
    def _begin(self, ids: list[int], extra: dict[str, Any], sampling: bool) -> VLLMRow:
        try:
            policy = self._policy(str(extra[OPTION]), sampling, remote=True) if OPTION in extra else None
        except Exception as error:
            self.log_once(f"a request's {OPTION} is left out", error)
            policy = None
        policy = policy or self._policy(self.source.policy, sampling)
        try:
            memory = self.source.lookup.begin(ids)
        except Exception as error:
            self.log_once("a request goes on without drafts", error)
            memory, policy = None, self._policy(OFF)
        return new_row(ids, memory, policy, self._calibrations[sampling])

    def _policy(self, text: str, sampling: bool = False, remote: bool = False) -> StoppingPolicy:
        """For one request; `remote`: as that asks for it."""
        policy = new_policy(text, remote)
        require(  # some work out as many lengths as that, step by step
            not remote or policy.limit <= self._most_drafted,
            f"it drafts up to {policy.limit} tokens a step; here {self._most_drafted} at most",
        )
        if policy.reads_costs and not self.settings.timed:
            raise PacelineError(f"policy '{text}' reads measured costs, on which ranks of external_launcher differ")

        def cost(drafted: int) -> float:
            return self.lengths.relative(self._count, drafted)

        before = self._before[sampling]
        here = Setting("", self.source.lookup.source, None, None, cost=cost, pass_cost=cost, before=before)
        policy.check(here)
        policy.seed(0)
        return policy

    # -- a step ----------------------------------------------------------------------------------------------------
    def _outcome(self, rows: Sequence[VLLMRow | None], sampled: Sequence[list[int]], now: float) -> None:
        """Tell everybody what came of the last step. Its time counts where all rows decoded, and nobody joined."""
        pairs = zip(rows, sampled, strict=True)
        known = [(row, ids) for row, ids in pairs if row is not None and row.step == self._step]
        if known and len(known) == len(rows):
            width, emitted = sum(row.width for row, _ in known), sum(len(ids) for _, ids in known)
            self.lengths.observe(len(known), width, emitted, now - self._ended)
        for row, ids in known:
            row.policy.observe(row.drafted, min(len(ids) - 1, row.drafted))
            if row.found is not None:
                learn(row.found, row.path, ids, row.calibration)

    def _tell_states(self, rows: Sequence[VLLMRow | None], sampled: Sequence[list[int]]) -> None:
        if self.states is None:
            return
        widths = [1 + row.width if row is not None and row.step == self._step else 1 for row in rows]
        accepted = [min(max(len(ids) - 1, 0), width - 1) for ids, width in zip(sampled, widths, strict=True)]
        hidden = self.states.of(widths, accepted)
        for at, row in enumerate(rows):
            if row is not None and row.memory is not None:
                self.source.lookup.told(row.memory, None if hidden is None else hidden[at])

    def _drafts(self, rows: Sequence[VLLMRow]) -> list[list[int]]:
        depths = [reach(row) for row in rows]  # type: ignore[arg-type]  # a request has room and policy
        asked = [row for row, depth in zip(rows, depths, strict=True) if depth and not row.failed]
        for row in rows:
            row.found, row.path = None, []
        self._ask(asked)
        probabilities = np.zeros((len(rows), self.settings.most))
        for at, (row, depth) in enumerate(zip(rows, depths, strict=True)):
            if row.found is not None:
                row.path = row.found.best_path()[:depth]
                said = path_probabilities(row.found, row.path, row.calibration)
                probabilities[at, : len(said)] = np.maximum(said, 1e-9)  # 0: there is no token
        return self._chosen(rows, probabilities)

    def _ask(self, rows: Sequence[VLLMRow]) -> None:
        """Have the source propose for each of them; those for which it fails go on without drafts."""
        lookup, most = self.source.lookup, self.settings.most
        for row in rows:
            with self._guarded(row):
                lookup.observe(row.ids, row.memory)
        rows = [row for row in rows if not row.failed]
        if not rows:
            return
        try:
            found = lookup.propose_all([row.ids for row in rows], [row.memory for row in rows], most, WIDER * most)
        except Exception:  # for one of them
            for row in rows:
                with self._guarded(row):
                    row.found = lookup.propose(row.ids, row.memory, most, WIDER * most)
            return
        for row, candidates in zip(rows, found, strict=True):
            row.found = candidates

    @contextmanager
    def _guarded(self, row: VLLMRow) -> Iterator[None]:
        """A request for which this fails goes on without drafts."""
        try:
            yield
        except Exception as error:
            row.failed = True
            self.log_once("a request goes on without drafts", error)

    def _chosen(self, rows: Sequence[VLLMRow], probabilities: Float[np.ndarray, "rows most"]) -> list[list[int]]:
        lengths = self.lengths.choose(probabilities, self.source.auto and self.settings.timed).tolist()
        drafts = []
        filled = self.settings.mode == PAD and any(lengths)
        for row, length in zip(rows, lengths, strict=True):
            draft = [row.found.tokens[node - 1] for node in row.path[:length]] if row.found is not None else []
            if filled:
                draft += [row.ids[-1]] * (row.room - length)
            row.drafted, row.width = length, len(draft)
            drafts.append(draft)
        return drafts
