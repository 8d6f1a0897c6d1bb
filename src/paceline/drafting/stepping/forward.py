"""Heads that draft step by step at work, over a KV cache of their own that follows the target's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from paceline.drafting.base import Row
from paceline.drafting.stepping.waiting import Taps, Waiting
from paceline.targets.cache import KVCache
from paceline.targets.span import Span
from paceline.targets.target import Target

if TYPE_CHECKING:
    from paceline.targets.native.target import Ranked

#: The states that a head makes, and what it tells of some of them.
Made: TypeAlias = tuple[Float[Tensor, "batch width hidden"], Float[Tensor, "batch last tokens"] | None, "Ranked | None"]

ALONG = 4  # tokens that a row may catch up with in the pass over its root
TAIL = 16  # see `SteppingForward`: of a long prompt, or when drafting was not asked for, only the last ones are read


class Guessed(NamedTuple):
    states: Float[Tensor, "batch width hidden"]  # from which the next step goes on
    logits: Float[Tensor, "batch width tokens"]  # of the tokens that can be drafted
    ranked: Ranked | None = None  # what was told of them besides


class SteppingForward(ABC):
    """At position t a head reads hidden states of the target and token t + 1, and makes a state from which token t + 2
    is told; in the next step of a draft that state stands for the target's. Subclasses say what a step computes.

    Each slot of a row of the cache holds what the head reads at one position: the target's hidden states there and the
    next token. After the root stands what comes of states that the head guesses, until the next round. The first slot
    need not be the first position: positions count from what the head has read first.

    `row.state.waiting` are hidden states of the target that the head has not read (`Waiting`).

    Attributes:
        taps: which of the target's hidden states it reads.
        shallow: of which of them the next token comes in as its own; 0: it comes in as its embedding.
        tail: most tokens that are read at once: of more only the last ones, as if the text began there.
    """

    tail = TAIL

    def __init__(self, target: Target, taps: tuple[int, ...], shallow: int = 0) -> None:
        self.target, self.taps, self.shallow = target, taps, shallow
        self.cache: KVCache

    @abstractmethod
    def new_cache(self, batch: int, capacity: int) -> KVCache: ...

    @abstractmethod
    def features(self, states: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        """What the output matrix reads of guessed states."""

    @abstractmethod
    def head(self, states: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        """Logits of guessed states."""

    @abstractmethod
    def fused(self, taps: Sequence[Float[Tensor, "batch width hidden"]]) -> Float[Tensor, "batch width hidden"]:
        """What the first step of a draft reads in place of a guessed state."""

    @abstractmethod
    def run_layers(
        self, states: Float[Tensor, "batch width hidden"], span: Span, cache: KVCache, tokens: Tensor | None
    ) -> Float[Tensor, "batch width hidden"]:
        """One step: the head's states after these and the span's tokens; `tokens` as of `roots`."""

    def _read(
        self,
        taps: Sequence[Float[Tensor, "batch width hidden"]],
        span: Span,
        cache: KVCache,
        tokens: Tensor | None = None,
        last: int = 0,
    ) -> Made:
        """After tokens whose hidden states are known; see `_run`."""
        return self._run(self.fused(taps), span, cache, tokens, last)

    def _run(
        self,
        states: Float[Tensor, "batch width hidden"],
        span: Span,
        cache: KVCache,
        tokens: Tensor | None = None,
        last: int = 0,
    ) -> Made:
        """The head's states, and logits of the `last` nodes: of a single row, or of all nodes in several."""
        return self._with_logits(self.run_layers(states, span, cache, tokens), None, last)

    def _with_logits(self, states: Float[Tensor, "batch width hidden"], ranked: Ranked | None, last: int) -> Made:
        if ranked:
            return states, ranked.logits, ranked
        return states, self.head(states[:, -last:]) if last else None, None

    @property
    def most(self) -> int:
        """Tokens whose hidden states are needed of a prompt."""
        return self.tail + ALONG

    def start(self, batch: int, capacity: int) -> None:
        self.cache = self.new_cache(batch, capacity + ALONG)

    def begin(self, row: Row) -> None:
        """A request joins. All that waits is read when its first draft is asked for."""
        self.cache.lengths[row.slot] = 0

    def starts(self, rows: int) -> np.ndarray:
        """Where the trees of the first rows begin in the cache: the slots of their roots."""
        starts: np.ndarray = np.maximum(self.cache.lengths[:rows] - 1, 0)
        return starts

    def roots(self, rows: Sequence[Row], tokens: Float[Tensor, "batch 1 hidden"] | None = None) -> Guessed:
        """What is guessed at the roots, once what waits has been read.

        Args:
            tokens: the roots' own states, of a head that reads these.
        """
        self.catch_up(rows)
        news = [self._taken(row) for row in rows]
        cache, counts = self.cache.rows(0, len(rows)), [len(new[0]) for new in news]
        # Of a prompt of one token, or one that another request has read, there is nothing: it is a blind guess,
        # whose slot the truth gets.
        width = max(1, *counts)
        hidden = [_side_by_side(of_tap, width) for of_tap in zip(*news, strict=True)]
        ids = [(row.ids[-max(count, 1) :] + [0] * width)[:width] for row, count in zip(rows, counts, strict=True)]
        span = Span(torch.from_numpy(np.array(ids)).to(self.target.device), cache.lengths.copy())
        if tokens is not None:
            own = [self._tokens(new, root) for new, root in zip(news, tokens, strict=True)]
            tokens = _side_by_side(own, width)
        states, logits, ranked = self._read(hidden, span, cache, tokens, last=1 if len(rows) == 1 else 0)
        for row, count in enumerate(counts):
            cache.lengths[row] += count
        if logits is not None:
            return Guessed(states[:, -1:], logits, ranked)
        states = states[range(len(rows)), [max(count - 1, 0) for count in counts]][:, None]
        return Guessed(states, self.head(states))

    def nodes(self, states: Float[Tensor, "batch width hidden"], span: Span, tokens: Tensor | None = None) -> Guessed:
        """What is guessed at nodes of the trees, from the states guessed at their parents; `tokens` as of `roots`."""
        states, logits, ranked = self._run(states, span, self.cache.rows(0, span.batch), tokens, last=span.width)
        assert logits is not None
        return Guessed(states, logits, ranked)

    def catch_up(self, rows: Sequence[Row]) -> None:
        """Of the rows that are drafted for, read what waits but the last tokens, which are read with the root."""
        for row in rows:
            waiting = len(row.state.waiting)
            if row.room > 0 and waiting > ALONG:
                self._read_waiting(row, waiting - ALONG)

    @staticmethod
    def _taken(row: Row) -> Taps:
        """What waits, and no longer does; nothing of a row that is not drafted for."""
        waiting: Waiting = row.state.waiting
        return waiting.take(None if row.room > 0 else 0)

    def _read_waiting(self, row: Row, count: int) -> None:
        """Read the first `count` of what waits, or only the last of them."""
        own, end = self.cache.rows(row.slot, row.slot + 1), len(row.ids) - len(row.state.waiting) + count
        if count > self.tail:
            own.lengths[0] = 0
        taken = row.state.waiting.take(count)
        tokens = self._tokens(taken, row.state.waiting.first(self.shallow))[None] if self.shallow else None
        last = slice(-self.tail, None)
        pieces = [tap[None, last] for tap in taken]
        length = pieces[0].shape[1]
        ids = torch.tensor([row.ids[end - length : end]], device=self.target.device)
        self._read(pieces, Span(ids, own.lengths.copy()), own, None if tokens is None else tokens[:, last])
        own.lengths += length

    def _tokens(self, taken: Taps, after: Float[Tensor, "1 hidden"]) -> Float[Tensor, "tokens hidden"]:
        """The own states of the tokens that follow those taken; `after`: of the last of them."""
        return torch.cat([taken[self.taps.index(self.shallow)][1:], after])


def _side_by_side(rows: Sequence[Float[Tensor, "tokens hidden"]], width: int) -> Float[Tensor, "batch width hidden"]:
    """Rows of different lengths as a batch, filled up with zeros."""
    if len(rows) == 1 and len(rows[0]) == width:
        return rows[0][None]
    return torch.stack([nn.functional.pad(row, (0, 0, 0, width - len(row))) for row in rows])
