"""What a head with a trimmed vocabulary can draft besides: tokens of the text it continues, request by request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from paceline.drafting.base import Row
from paceline.drafting.output_rows import gathers_rows, output_bias, output_rows
from paceline.targets.target import Target


class TextVocabulary:
    """The head's tokens, and for each row those of its text that are not among them: the newest to appear.

    Their rows of the target's output matrix are gathered once, when they appear; of that matrix nothing else is read.

    Args:
        tokens: ids of the head's own.
        extra: most others a row has; 0: none.
    """

    def __init__(self, target: Target, tokens: Int[Tensor, " vocab"], extra: int) -> None:
        self.target, self.tokens = target, tokens
        self.extra = min(extra, target.vocab_size - len(tokens)) if gathers_rows(target) else 0
        self._bias = output_bias(target, None) if self.extra else None  # of all tokens
        self._own = frozenset(tokens.tolist()) if self.extra else frozenset[int]()
        self._ids: Int[Tensor, "batch vocab+extra"]
        self._rows: Float[Tensor, "batch extra hidden"]
        self._read: list[int]  # tokens of each row's text that have been looked at
        self._found: list[list[int]]  # the others of each row, by place
        self._next: list[int]  # the place that the next one takes

    def start(self, batch: int) -> None:
        """A run begins with so many rows."""
        size, dtype, device = self.target.config.hidden_size, self.target.dtype, self.target.device
        self._ids = functional.pad(self.tokens.repeat(batch, 1), (0, self.extra))
        self._rows = torch.zeros(batch, self.extra, size, dtype=dtype, device=device)
        self._read, self._next = [0] * batch, [0] * batch
        self._found = [[] for _ in range(batch)]

    def begin(self, slot: int) -> None:
        """A request joins in a row."""
        self._read[slot], self._next[slot], self._found[slot] = 0, 0, []

    def move(self, source: int, target: int) -> None:
        """The request in row `source` moves to row `target`."""
        for part in (self._ids, self._rows):
            part[target].copy_(part[source])
        for kept in (self._read, self._next):
            kept[target] = kept[source]
        self._found[target] = self._found[source]

    def read(self, rows: Sequence[Row]) -> None:
        """Look at what has come to the texts since the last time."""
        for row in rows if self.extra else ():
            slot, new = row.slot, row.ids[self._read[row.slot] :]
            self._read[slot] = len(row.ids)
            if not self._own.issuperset(new):
                self._add(slot, [token for token in dict.fromkeys(new) if token not in self._own][-self.extra :])

    def _add(self, slot: int, tokens: Sequence[int]) -> None:
        """The oldest make room where there is none."""
        found = self._found[slot]
        known = set(found)
        tokens = [token for token in tokens if token not in known]
        places = [(self._next[slot] + i) % self.extra for i in range(len(tokens))]
        for place, token in zip(places, tokens, strict=True):
            found[place : place + 1] = [token]
        if tokens:
            ids = torch.tensor(tokens, device=self.target.device)
            self._ids[slot, [len(self.tokens) + place for place in places]] = ids
            self._rows[slot, places] = output_rows(self.target, ids)
            self._next[slot] = (places[-1] + 1) % self.extra

    def of(self, slot: int) -> Int[Tensor, " tokens"]:
        """Ids of the tokens that can be drafted in a row, in the order of their logits."""
        return self._ids[slot, : len(self.tokens) + len(self._found[slot])]

    def logits(
        self, features: Float[Tensor, "batch width hidden"], own: Float[Tensor, "batch width vocab"]
    ) -> Float[Tensor, "batch width tokens"]:
        """The head's own logits with those of each row's other tokens after them, and then what nobody reads."""
        most = max(map(len, self._found[: len(features)]))
        if not most:
            return own
        others = features @ self._rows[: len(features), :most].mT
        if self._bias is not None:
            first = len(self.tokens)
            others = others + self._bias[self._ids[: len(features), None, first : first + most]]
        return torch.cat([own, others], -1)
