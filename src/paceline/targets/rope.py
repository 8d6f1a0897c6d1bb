"""Rotary position tables, computed once."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RopeTables:
    """cos and sin by position, `[positions, rotary / 2]`: the model's own, half of each (the other half repeats it)."""

    def __init__(self, rotary: nn.Module, dtype: torch.dtype, device: torch.device, context: int) -> None:
        self._rotary, self._like, self._context = rotary, torch.empty(0, dtype=dtype, device=device), context
        self.cos, self.sin = self._compute(min(2048, context))

    @property
    def size(self) -> int:
        """Rotated dimensions of a head."""
        return 2 * self.cos.shape[1]

    def grow(self, capacity: int) -> None:
        """Make sure that the positions of a cache of this capacity are there."""
        wanted = min(capacity, self._context)
        if wanted > len(self.cos):
            self.cos, self.sin = self._compute(min(2 * wanted, self._context))

    def _compute(self, positions: int) -> tuple[Tensor, Tensor]:
        at = torch.arange(positions, device=self._like.device)[None]
        cos, sin = (_half(table[0]).to(self._like.dtype) for table in self._rotary(self._like, at))
        return cos, sin


def _half(table: Tensor) -> Tensor:
    """Some families repeat the angles as a whole, Cohere's one by one."""
    half = table[:, : table.shape[1] // 2]
    return (half if torch.equal(half, table[:, half.shape[1] :]) else table[:, ::2]).contiguous()
