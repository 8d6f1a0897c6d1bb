"""The exit head at work: its layers on a KV cache of their own, which follows the target's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from paceline.drafters.early_exit.head import ExitHead
from paceline.drafting.base import Row
from paceline.drafting.own_layers import fast_layers, fast_linear
from paceline.targets.cache import KVCache
from paceline.targets.span import Span
from paceline.targets.target import PREFILL_CHUNK, Target


@dataclass
class ExitProgress:
    """A request's state: how far the exit layers have come.

    Attributes:
        waiting: hidden states `[tokens, hidden]` of committed tokens that only the target has read.
        read: how many nodes of this round's tree the exit layers have read, the first ones.
    """

    waiting: list[Tensor] = field(default_factory=list)
    read: int = 0


class Exit:
    """Exit layers and output matrix behind the block view of the target's own tier.

    The cache's rows lag behind the target's by what waits in `row.state`, a `ExitProgress`, until the row's next draft.
    From then until the end of the round both caches have the same slots.
    """

    def __init__(self, head: ExitHead, target: Target) -> None:
        lm, self.layers = head.lm, head.config.exit_layers
        self.model = fast_layers(lm, target)
        self._lift = None if head.lift is None else fast_linear(head.lift.weight.detach(), None, target)
        self.cache: KVCache

    def start(self, batch: int, capacity: int) -> None:
        self.cache = self.model.new_cache(batch, capacity)

    def begin(self, row: Row, hidden: Float[Tensor, "tokens hidden"]) -> None:
        """A request joins with its prompt's hidden states."""
        self.cache.lengths[row.slot] = 0
        self._read(row, hidden)
        row.state = ExitProgress()

    def root(self, rows: Sequence[Row], hidden: Float[Tensor, "batch 1 hidden"]) -> Float[Tensor, "batch 1 hidden"]:
        """The layers over the roots, and over what waits before them."""
        news = []
        for row in rows:
            new = torch.cat([*row.state.waiting, hidden[row.slot]])
            self._read(row, new[:-2])  # along with the root at most one token, which a round's last often is
            news.append(new[-2:])
            row.state.waiting = []
        before = np.array([len(new) - 1 for new in news])
        cache = self.cache.rows(0, len(rows))
        out = self._layers(nn.utils.rnn.pad_sequence(news, batch_first=True), cache, cache.lengths.copy())
        cache.lengths += before
        return out[range(len(rows)), before][:, None]

    def nodes(self, hidden: Float[Tensor, "batch width hidden"], span: Span) -> Float[Tensor, "batch width hidden"]:
        """The layers over further nodes of the draft region, at the target's span."""
        return self.model.layers(hidden, span, self.cache.rows(0, span.batch), 0, self.layers)

    def logits(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows tokens"]:
        """Norm and output matrix."""
        logits = self.model.head(hidden)
        return logits if self._lift is None else self._lift(logits.flatten(0, -2)).view(*hidden.shape[:-1], -1)

    def commit(self, row: Row, path: list[int], hidden: Float[Tensor, "nodes hidden"]) -> None:
        """The accepted nodes of a round, root first, and the hidden states of all its nodes."""
        read = [node for node in path if node < row.state.read]  # a node is read before its children
        if read:
            self.cache.rows(row.slot, row.slot + 1).commit([read])
        if left := path[len(read) :]:
            in_line = left[-1] - left[0] < len(left)  # as those of a chain are: much quicker to copy
            row.state.waiting.append(hidden[left[0] : left[-1] + 1].clone() if in_line else hidden[left])

    def _read(self, row: Row, hidden: Float[Tensor, "tokens hidden"]) -> None:
        own = self.cache.rows(row.slot, row.slot + 1)
        for at in range(0, len(hidden), PREFILL_CHUNK):
            piece = hidden[at : at + PREFILL_CHUNK]
            self._layers(piece[None], own, own.lengths.copy())
            own.lengths += len(piece)

    def _layers(self, hidden: Tensor, cache: KVCache, starts: np.ndarray) -> Tensor:
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)  # for their shape
        return self.model.layers(hidden, Span(ids, starts), cache, 0, self.layers)
