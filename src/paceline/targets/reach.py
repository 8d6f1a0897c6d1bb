"""How far back the tokens of a layer see: all before them, a sliding window, or their chunk of the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from paceline.targets.span import Span


@dataclass(frozen=True)
class Reach:
    """What a layer's tokens see of those before them, by position.

    Args:
        name: transformers' name for this kind of layer, under which a model looks up its mask.
        window: positions that a token sees, its own included; None: all.
        chunked: the text is cut into chunks of `window` positions, and a token sees its own chunk only.
    """

    name: str = "full_attention"
    window: int | None = None
    chunked: bool = False

    def limit(
        self, seen: Bool[Tensor, "batch width keys"], positions: Tensor, distances: Int[Tensor, "batch width keys"]
    ) -> Bool[Tensor, "batch width keys"]:
        """Of the keys `seen`, those in the window of tokens at `positions` ([batch, width, 1])."""
        assert self.window is not None
        if self.chunked:
            return seen & (positions // self.window == (positions - distances) // self.window)
        return seen & (distances < self.window)


def ring_mask(span: Span, reach: Reach, size: int, dtype: torch.dtype) -> Float[Tensor, "batch 1 width keys"]:
    """Additive mask over a ring of `size` slots, where position `p` lies in slot `p % size`.

    A node of the draft region counts by its depth, not by its slot: the nodes between it and an ancestor are those of
    its path that were drafted after the ancestor.
    """
    slot = torch.arange(min(span.end, size), device=span.ids.device)
    inside = (slot - span.first[:, None])[:, None] % size  # the slot as counted from the row's draft region
    region = span.offset + span.width
    positions = span.positions[:, :, None]
    if span.ancestors is None:
        drafted = span.slots[:, :, None] - span.first[:, None, None] - inside
        on_path = drafted >= 0
    else:
        index = inside.clamp(max=region - 1).expand(-1, span.width, -1)
        behind = span.ancestors.flip(2).cumsum(2).flip(2) - span.ancestors.long()
        drafted, on_path = behind.gather(2, index), span.ancestors.gather(2, index)
    committed = inside >= region
    distances = torch.where(committed, positions - (span.first[:, None, None] + inside - size), drafted)
    seen = torch.where(committed, distances <= positions, on_path)
    return additive(reach.limit(seen, positions, distances), dtype)


def tail_mask(span: Span, reach: Reach, tail: int, dtype: torch.dtype) -> Float[Tensor, "1 1 width keys"]:
    """Additive mask of one row's chain over its last `tail` committed tokens and itself."""
    positions = span.positions[:, :, None]
    keys = torch.arange(span.end - span.width - tail, span.end, device=span.ids.device)
    distances = positions - keys
    return additive(reach.limit(distances >= 0, positions, distances), dtype)


def additive(seen: Bool[Tensor, "batch width keys"], dtype: torch.dtype) -> Float[Tensor, "batch 1 width keys"]:
    """0 where a key is seen, the lowest number of the type elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
