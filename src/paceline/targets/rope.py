"""Rotary position tables, computed once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class StaticRotary:
    """What a rotary module of transformers computes, bit for bit, where angles depend on the position only."""

    def __init__(self, frequencies: Tensor, scaling: float) -> None:
        self.inv_freq, self.attention_scaling = frequencies, scaling

    def __call__(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * self.inv_freq.float()
        angles = torch.cat((angles, angles), dim=-1)
        scaling = self.attention_scaling
        return (angles.cos() * scaling).to(like.dtype), (angles.sin() * scaling).to(like.dtype)


class TypedRotary:
    """Of a rotary module that has angles for each type of layer, those of one type."""

    def __init__(self, rotary: Any, layer_type: str) -> None:
        self._rotary, self._layer_type = rotary, layer_type
        self.rope_type: str = rotary.rope_type[layer_type]
        self.inv_freq: Tensor = getattr(rotary, f"{layer_type}_inv_freq")
        self.attention_scaling: float = getattr(rotary, f"{layer_type}_attention_scaling")

    def __call__(self, like: Tensor, positions: Tensor) -> Any:
        return self._rotary(like, positions, self._layer_type)


def rotaries(rotary: Any) -> dict[str, Any]:
    """A rotary module by types of layers; under "" where all have the same angles."""
    if not isinstance(getattr(rotary, "rope_type", None), dict):
        return {"": rotary}
    return {layer_type: TypedRotary(rotary, layer_type) for layer_type in rotary.rope_type}


class RopeTables:
    """cos and sin by position, `[positions, rotary / 2]`: the model's own, half of each (the other half repeats it)."""

    def __init__(self, rotary: Any, dtype: torch.dtype, device: torch.device, context: int) -> None:
        self._rotary, self._like, self._context = rotary, torch.empty(0, dtype=dtype, device=device), context
        self.cos, self.sin = self._compute(min(2048, context))

    def __getstate__(self) -> dict[str, Any]:
        """Of a static rotary module; raises ValueError for one that computes anything else."""
        rotary: Any = self._rotary
        twin = StaticRotary(rotary.inv_freq, float(rotary.attention_scaling))
        made = RopeTables(twin, self._like.dtype, self._like.device, self._context)
        size = min(len(made.cos), len(self.cos))
        if not (torch.equal(made.cos[:size], self.cos[:size]) and torch.equal(made.sin[:size], self.sin[:size])):
            raise ValueError("its angles depend on more than the position")
        return {"rotary": twin, "dtype": self._like.dtype, "device": self._like.device, "context": self._context}

    def __setstate__(self, state: dict[str, Any]) -> None:
        RopeTables.__init__(self, **state)

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
        size = self._rotary.inv_freq.numel()
        cos, sin = (_half(table[0], size).to(self._like.dtype) for table in self._rotary(self._like, at))
        return cos, sin


def _half(table: Tensor, size: int) -> Tensor:
    """Most families repeat the `size` angles as a whole, Cohere's one by one, gpt-oss not at all."""
    half = table[:, :size]
    return (half if torch.equal(half, table[:, size:]) or table.shape[1] == size else table[:, ::2]).contiguous()
