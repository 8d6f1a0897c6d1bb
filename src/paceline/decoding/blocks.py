"""Room for what is kept of tokens, taken once and given out in blocks."""

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
    size, and the process would grow.

    Args:
        tokens: how many there is room for, rounded up to whole blocks.
    """

    def __init__(self, tokens: int) -> None:
        self.count = -(-tokens // BLOCK)
        self._free = list(range(self.count))
        self._keys_values: Float[Tensor, "blocks layers 2 kv_heads block head_dim"] | None = None
        self._hidden: dict[int, Float[Tensor, "blocks block hidden"]] = {}

    def fits(self, tokens: int) -> bool:
        """Whether so many tokens find room now."""
        return tokens <= len(self._free) * BLOCK

    def like(self, cache: KVCache) -> Tensor:
        """The room for keys and values, made for this kind of cache when it is first asked for."""
        if self._keys_values is None:
            layers, two, _, heads, _, width = cache.store.shape
            self._keys_values = cache.store.new_empty(self.count, layers, two, heads, BLOCK, width)
        return self._keys_values

    def put(self, row: KVCache, tokens: int, hidden: Hidden) -> list[int]:
        """Copy the first tokens of a one-row cache, and their hidden states; returns the blocks."""
        blocks, self._free = self._free[: -(-tokens // BLOCK)], self._free[-(-tokens // BLOCK) :]
        for block, start, stop in _spans(blocks, tokens):
            self.like(row)[block, :, :, :, : stop - start] = row.store[:, :, 0, :, start:stop]
            for tap, states in hidden.items():
                if tap not in self._hidden:
                    self._hidden[tap] = states.new_empty(self.count, BLOCK, states.shape[1])
                self._hidden[tap][block, : stop - start] = states[start:stop]
        return blocks

    def get(self, blocks: Sequence[int], tokens: int, row: KVCache, taps: Collection[int]) -> Hidden:
        """Copy so many tokens into an empty one-row cache; returns their hidden states."""
        for block, start, stop in _spans(blocks, tokens):
            row.store[:, :, 0, :, start:stop] = self.like(row)[block, :, :, :, : stop - start]
        row.lengths[0] = tokens
        needed = list(blocks[: -(-tokens // BLOCK)])
        return {tap: self._hidden[tap][needed].flatten(0, 1)[:tokens] for tap in taps}

    def give_back(self, blocks: Sequence[int]) -> None:
        self._free += blocks


def _spans(blocks: Sequence[int], tokens: int) -> Iterator[tuple[int, int, int]]:
    """Each block with the tokens that it holds of so many, from and to."""
    for block, start in zip(blocks, range(0, tokens, BLOCK), strict=False):
        yield block, start, min(start + BLOCK, tokens)
