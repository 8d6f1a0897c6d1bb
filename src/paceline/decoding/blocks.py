"""Room for what is kept of tokens, given out in blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

if TYPE_CHECKING:
    from paceline.targets.cache import KVCache

BLOCK = 32  # tokens

Hidden = Mapping[int, Float[Tensor, "tokens hidden"]]


class TokenBlocks:
    """Keys, values and hidden states of texts, each in blocks of `BLOCK` tokens.

    Texts come and go for as long as a server runs: in tensors of their own, one after another would find no gap of its
    size, and the process would grow. So all are in one, which is made larger as texts come, or at once (`take_all`).

    Args:
        tokens: how many there is room for at most, rounded up to whole blocks.
    """

    def __init__(self, tokens: int) -> None:
        self.most, self._taken = -(-tokens // BLOCK), 0  # blocks: at most, and those that there is memory for
        self._free: list[int] = []
        self._keys_values: Float[Tensor, "blocks layers 2 kv_heads block head_dim"] | None = None
        self._hidden: dict[int, Float[Tensor, "blocks block hidden"]] = {}

    def fits(self, tokens: int) -> bool:
        """Whether so many tokens find room now."""
        return tokens <= (len(self._free) + self.most - self._taken) * BLOCK

    def take_all(self, cache: KVCache) -> None:
        """Have the system give all of the memory for keys and values of this kind of cache, before there are any."""
        self._grow(cache, self.most).zero_()

    def _grow(self, cache: KVCache, blocks: int) -> Tensor:
        """Memory for so many blocks in all; what is there already stays. Returns the keys and values."""
        layers, two, _, heads, _, width = cache.store.shape
        larger = cache.store.new_empty(blocks, layers, two, heads, BLOCK, width)
        if self._keys_values is not None:
            larger[: self._taken] = self._keys_values
        hidden = {tap: _longer(states, blocks) for tap, states in self._hidden.items()}
        self._keys_values, self._hidden = larger, hidden  # when there is memory for all
        self._free += range(self._taken, blocks)
        self._taken = blocks
        return larger

    def put(self, row: KVCache, tokens: int, hidden: Hidden) -> list[int]:
        """Copy the first tokens of a one-row cache, and their hidden states; returns the blocks."""
        count = -(-tokens // BLOCK)
        if count > len(self._free):  # twice as many as before: copied seldom
            self._grow(row, min(self.most, max(2 * self._taken, self._taken + count - len(self._free))))
        for tap, states in hidden.items():
            if tap not in self._hidden:
                self._hidden[tap] = states.new_empty(self._taken, BLOCK, states.shape[1])
        assert self._keys_values is not None
        blocks, self._free = self._free[:count], self._free[count:]
        for block, start, stop in _spans(blocks, tokens):
            self._keys_values[block, :, :, :, : stop - start] = row.store[:, :, 0, :, start:stop]
            for tap, states in hidden.items():
                self._hidden[tap][block, : stop - start] = states[start:stop]
        return blocks

    def get(self, blocks: Sequence[int], tokens: int, row: KVCache, taps: Collection[int]) -> Hidden:
        """Copy so many tokens into an empty one-row cache; returns their hidden states."""
        assert self._keys_values is not None
        for block, start, stop in _spans(blocks, tokens):
            row.store[:, :, 0, :, start:stop] = self._keys_values[block, :, :, :, : stop - start]
        row.lengths[0] = tokens
        needed = list(blocks[: -(-tokens // BLOCK)])
        return {tap: self._hidden[tap][needed].flatten(0, 1)[:tokens] for tap in taps}

    def give_back(self, blocks: Sequence[int]) -> None:
        self._free += blocks


def _longer(states: Tensor, blocks: int) -> Tensor:
    longer = states.new_empty(blocks, *states.shape[1:])
    longer[: len(states)] = states
    return longer


def _spans(blocks: Sequence[int], tokens: int) -> Iterator[tuple[int, int, int]]:
    """Each block with the tokens that it holds of so many, from and to."""
    for block, start in zip(blocks, range(0, tokens, BLOCK), strict=False):
        yield block, start, min(start + BLOCK, tokens)
