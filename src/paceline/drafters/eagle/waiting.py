"""What a head has yet to read of the target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


class Waiting:
    """Hidden states of the target that a head has not read, `[tokens, taps * hidden]`, up to the token before the root.

    Most are never read where a head is seldom asked, so they are put together when they are. Of many, some more than
    the last `most` stay.
    """

    def __init__(self, first: Sequence[Float[Tensor, "tokens hidden"]], most: int) -> None:
        self._pieces: list[tuple[Sequence[Tensor], Sequence[int]]] = [(first, range(len(first[0])))]
        self._most, self._count = most, len(first[0])

    def __len__(self) -> int:
        """Tokens."""
        return self._count

    def add(self, taps: Sequence[Float[Tensor, "nodes hidden"]], path: Sequence[int]) -> None:
        """The nodes `path` of what a pass has tapped."""
        self._pieces.append((taps, path))
        self._count += len(path)
        while self._count - len(self._pieces[0][1]) > self._most:
            self._count -= len(self._pieces.pop(0)[1])

    def whole(self) -> Float[Tensor, "tokens width"]:
        pieces = [torch.cat([_rows(tap, path) for tap in taps], -1) for taps, path in self._pieces if len(path)]
        if len(pieces) != 1:
            nothing = [tap[:0] for tap in self._pieces[0][0]]
            pieces = [torch.cat(pieces) if pieces else torch.cat(nothing, -1)]
        self._pieces = [(pieces, range(len(pieces[0])))]
        return pieces[0]

    def keep(self, count: int) -> None:
        """Only the last ones; the others have been read."""
        rest = self.whole()[len(self) - count :]
        self._pieces, self._count = [([rest], range(count))], count


def _rows(hidden: Float[Tensor, "nodes hidden"], path: Sequence[int]) -> Float[Tensor, "path hidden"]:
    """These rows: most often the first ones, which need no copy."""
    return hidden[: len(path)] if path[-1] == len(path) - 1 else hidden[list(path)]
