"""What a head has yet to read of the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

Taps = Sequence[Float[Tensor, "tokens hidden"]]  # what a head reads side by side, each by itself

MANY = 64  # where more may wait they are copied: what a pass has tapped has rows of all nodes, and of other requests


class Waiting:
    """Hidden states of the target that a head has not read, up to the token before the root.

    Most are never read where a head is seldom asked, so they are put together when they are. Of many, some more than
    the last `most` stay.

    Args:
        order: the taps that the head reads.
        first: what there is of them, `[tokens, hidden]` each.
    """

    def __init__(self, order: Sequence[int], first: Mapping[int, Tensor], most: int) -> None:
        self._nothing = [first[tap][:0] for tap in order]
        self._order, self._most, self._count = order, most, len(first[order[0]])
        self._pieces: list[tuple[Mapping[int, Tensor], Sequence[int]]] = [(first, range(self._count))]

    def __len__(self) -> int:
        """Tokens."""
        return self._count

    def add(self, taps: Mapping[int, Float[Tensor, "nodes hidden"]], path: Sequence[int]) -> None:
        """The nodes `path` of what a pass has tapped."""
        if self._most > MANY:
            taps, path = {tap: taps[tap][list(path)] for tap in self._order}, range(len(path))
        self._pieces.append((taps, path))
        self._count += len(path)
        while self._count - len(self._pieces[0][1]) > self._most:
            self._count -= len(self._pieces.pop(0)[1])

    def first(self, tap: int) -> Float[Tensor, "1 hidden"]:
        """Of what waits, the first of this tap."""
        taps, path = next(piece for piece in self._pieces if len(piece[1]))
        return taps[tap][path[0]][None]

    def take(self, count: int | None = None) -> Taps:
        """The first `count`, or all: they wait no longer."""
        pieces = [[_rows(taps[tap], path) for tap in self._order] for taps, path in self._pieces if len(path)]
        self._pieces, taken = [], self._nothing
        if pieces:
            taken = pieces[0] if len(pieces) == 1 else [torch.cat(of_tap) for of_tap in zip(*pieces, strict=True)]
        if count is not None and count < self._count:
            rest = {tap: hidden[count:] for tap, hidden in zip(self._order, taken, strict=True)}
            self._pieces.append((rest, range(self._count - count)))
            taken = [hidden[:count] for hidden in taken]
        self._count -= len(taken[0])
        return taken


def _rows(hidden: Float[Tensor, "nodes hidden"], path: Sequence[int]) -> Float[Tensor, "path hidden"]:
    """These rows: most often the first ones, which need no copy."""
    return hidden[: len(path)] if path[-1] == len(path) - 1 else hidden[list(path)]
