"""Which request is in which row of vLLM's batch, and what is remembered of each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Integer

from paceline.compiled import compiled
from paceline.drafting.budget import FADING, Calibration

if TYPE_CHECKING:
    from paceline.drafting.lookup import Candidates
    from paceline.policies.base import StoppingPolicy

KEPT = 64  # steps that a request may be away before it is forgotten

_PRIME = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


@dataclass
class VLLMRow:
    """A request.

    Attributes:
        ids: prompt and output.
        memory: the source's.
        calibration: how often its candidates were right.
        found, path: the candidates of the last round, and which of them make the draft.
        drafted: how many of those were handed over.
        width: tokens that were, with what filled them up.
        step: number of the step it was last in.
        room: most tokens that it may draft now.
    """

    ids: list[int]
    memory: Any
    policy: StoppingPolicy
    calibration: Calibration
    found: Candidates | None = None
    path: list[int] = field(default_factory=list)
    drafted: int = 0
    width: int = 0
    step: int = -1
    room: int = 0
    failed: bool = False


Begin = Callable[[list[int], dict[str, Any], bool], VLLMRow]  # of its tokens, its options, and whether it samples


class ContentRows:
    """Requests told by their tokens: those with the same tokens have the same state, so which is which is no matter.

    For vLLM 0.32, which does not say which request a row is, nor whether it samples: all count as greedy.
    """

    def __init__(self) -> None:
        self._rows: OrderedDict[int, list[VLLMRow]] = OrderedDict()  # by fingerprint of their tokens

    def find(
        self, sampled: Sequence[list[int]], lengths: Integer[np.ndarray, " rows"], tokens: np.ndarray, begin: Begin
    ) -> list[VLLMRow | None]:
        """The requests of a step, None where a prompt is still being read; each has its new tokens.

        Args:
            sampled: new tokens of each row.
            lengths: tokens of each row, the new ones included.
            tokens: `[rows, max_model_len]`.
            begin: makes a request from its tokens but the new ones, its options, and whether it samples.
        """
        news = np.array([len(ids) for ids in sampled], np.int64)
        befores, afters = fingerprints(tokens, lengths, news)
        found: list[VLLMRow | None] = []
        for at, ids in enumerate(sampled):
            if not ids:
                found.append(None)
                continue
            if same := self._rows.get(int(befores[at])):
                row = same.pop()
                if not same:
                    del self._rows[int(befores[at])]
            else:
                row = begin(tokens[at, : lengths[at] - len(ids)].tolist(), {}, False)
            row.ids += ids
            found.append(row)
        for known, after in zip(found, afters, strict=True):
            if known is not None:
                self._rows.setdefault(int(after), []).append(known)
                self._rows.move_to_end(int(after))
        return found

    def forget(self, step: int) -> None:
        """Drop the requests that have long not been seen."""
        while self._rows:
            key, rows = next(iter(self._rows.items()))
            if any(step - row.step < KEPT for row in rows):
                return
            del self._rows[key]


class NamedRows:
    """Requests told by vLLM's own ids, with the options that came with them (`vllm_xargs`).

    Args:
        runner: vLLM's model runner, which a worker extension reaches from 0.33 on.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._rows: dict[str, VLLMRow] = {}

    def find(
        self, sampled: Sequence[list[int]], lengths: Integer[np.ndarray, " rows"], tokens: np.ndarray, begin: Begin
    ) -> list[VLLMRow | None]:
        """As of `ContentRows`. A request that was away, or whose drafts were left out, catches up."""
        found: list[VLLMRow | None] = []
        for at, (name, ids) in enumerate(zip(self._runner.input_batch.req_ids, sampled, strict=False)):
            if not ids:
                found.append(None)
                continue
            row = self._rows.get(name)
            if row is None or len(row.ids) >= lengths[at]:
                params = self._runner.requests[name].sampling_params
                extra, sampling = getattr(params, "extra_args", None) or {}, bool(getattr(params, "temperature", 0.0))
                row = self._rows[name] = begin(tokens[at, : lengths[at] - len(ids)].tolist(), extra, sampling)
            if len(row.ids) < lengths[at] - len(ids):
                row.step = -1  # what it drafted last was steps ago
            row.ids += tokens[at, len(row.ids) : lengths[at]].tolist()
            found.append(row)
        return found

    def forget(self, step: int) -> None:
        """Drop the requests that vLLM has no more."""
        for name in self._rows.keys() - self._runner.requests.keys():
            del self._rows[name]


def new_row(ids: list[int], memory: Any, policy: StoppingPolicy, before: Calibration) -> VLLMRow:
    """A request that joins."""
    return VLLMRow(ids, memory, policy, Calibration(before, FADING))


@compiled
def fingerprints(
    tokens: Integer[np.ndarray, "rows length"],
    lengths: Integer[np.ndarray, " rows"],
    news: Integer[np.ndarray, " rows"],
) -> tuple[Integer[np.ndarray, " rows"], Integer[np.ndarray, " rows"]]:
    """Hashes of each row's first `lengths` tokens: without the last `news` of them, and with them."""
    befores, afters = np.zeros(news.size, np.uint64), np.zeros(news.size, np.uint64)
    for row in range(news.size):
        hashed = _PRIME  # so that tokens of id 0 count as well
        for at in range(lengths[row]):
            if at == lengths[row] - news[row]:
                befores[row] = hashed
            hashed = (hashed ^ np.uint64(tokens[row, at])) * _PRIME
            hashed ^= hashed >> _SHIFT
        afters[row] = hashed
    return befores, afters
