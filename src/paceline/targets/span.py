"""Where a pass of the target stands: which tokens, at which positions and cache slots, seeing what."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass
class Span:
    """`batch x width` new tokens over a KV cache in which row `b` holds `starts[b]` committed tokens.

    The new tokens are written to the slots that follow the committed ones: node `i` of row `b` goes to slot
    `starts[b] + offset + i`. The slots from `starts[b]` on are the row's *draft region*; a drafter that fills it
    piece by piece passes the number of slots it has filled so far as `offset`.

    A node sees every committed slot of its row and, of the draft region, the slots that `ancestors` says
    (itself included); without `ancestors` the region is a chain and a node sees all slots up to its own.
    Padding nodes, those after the first `counts` of a row, are ordinary nodes whose results nobody reads: their slots
    are overwritten before they are seen. A target may leave them out.
    """

    ids: Int[Tensor, "batch width"]
    starts: np.ndarray  # int64 [batch]
    offset: int = 0
    depths: Int[Tensor, "batch width"] | None = None  # below the region's first token; None: a chain
    ancestors: Bool[Tensor, "batch width offset+width"] | None = None
    counts: np.ndarray | None = None  # int64 [batch]; None: no padding
    final: bool = False  # a piece of a prompt, over one row: all of it will be committed
    memo: dict[object, Any] = field(default_factory=dict, repr=False)  # what targets compute once a span

    @property
    def batch(self) -> int:
        return self.ids.shape[0]

    @property
    def width(self) -> int:
        return self.ids.shape[1]

    @cached_property
    def tokens(self) -> int:
        """Nodes without the padding."""
        return self.batch * self.width if self.counts is None else int(self.counts.sum())

    @cached_property
    def inside(self) -> Bool[np.ndarray, "batch width"]:
        """Which nodes are no padding."""
        counts = np.full(self.batch, self.width) if self.counts is None else self.counts
        return np.arange(self.width) < counts[:, None]

    @cached_property
    def firsts(self) -> list[int]:
        """Where each row's nodes begin among these."""
        counts = np.full(self.batch, self.width) if self.counts is None else self.counts
        firsts: list[int] = (counts.cumsum() - counts).tolist()
        return firsts

    @cached_property
    def end(self) -> int:
        """One past the last cache slot any row touches."""
        starts: list[float] = self.starts.tolist()
        return int(max(starts)) + self.offset + self.width

    @cached_property
    def seen(self) -> int:
        """What a model is told that asks how many tokens the cache holds: those of the longest row."""
        return int(self.starts.max()) + self.offset

    @cached_property
    def first(self) -> Int[Tensor, " batch"]:
        return torch.from_numpy(self.starts.astype(np.int64)).to(self.ids.device)

    @cached_property
    def slots(self) -> Int[Tensor, "batch width"]:
        steps = torch.arange(self.offset, self.offset + self.width, device=self.ids.device)
        return self.first[:, None] + steps

    @cached_property
    def positions(self) -> Int[Tensor, "batch width"]:
        return self.slots if self.depths is None else self.first[:, None] + self.depths

    def part(self, first: int, stop: int) -> Span:
        """Its nodes `first .. stop-1`, to be run when those before them have been."""
        return Span(
            self.ids[:, first:stop],
            self.starts,
            self.offset + first,
            None if self.depths is None else self.depths[:, first:stop],
            None if self.ancestors is None else self.ancestors[:, first:stop, : self.offset + stop],
        )

    def behind(self, bases: np.ndarray) -> Span:
        """Itself with slots and positions counted from `bases`, `[batch]`. Built once for the same ones."""
        key = ("behind", bases.tobytes())
        if key not in self.memo:
            starts = self.starts - bases
            self.memo[key] = Span(self.ids, starts, self.offset, self.depths, self.ancestors, self.counts, self.final)
        span: Span = self.memo[key]
        return span

    def row(self, row: int) -> Span:
        """One row of it."""
        rows = slice(row, row + 1)
        return Span(
            self.ids[rows],
            self.starts[rows],
            self.offset,
            None if self.depths is None else self.depths[rows],
            None if self.ancestors is None else self.ancestors[rows],
        )

    def mask(self, dtype: torch.dtype, explicit: bool = False) -> Float[Tensor, "batch 1 width end"] | None:
        """Additive attention mask over the slots `0 .. end-1`. Built once a span.

        None, unless `explicit`, where the default of SDPA attention says the same: one token over rows of equal
        length (sees everything), or a chain over an empty cache (plain causal).
        """
        if not explicit and self._is_default:
            return None
        if dtype not in self.memo:
            self.memo[dtype] = self._build_mask(dtype)
        mask: Tensor = self.memo[dtype]
        return mask

    @cached_property
    def _is_default(self) -> bool:
        level = bool((self.starts == self.starts[0]).all())
        return self.ancestors is None and level and (self.width == 1 or self.end == self.width)

    def _build_mask(self, dtype: torch.dtype) -> Tensor:
        slot = torch.arange(self.end, device=self.ids.device)
        if self.ancestors is None:
            seen = slot <= self.slots[:, :, None]
        else:
            committed = slot < self.first[:, None, None]
            inside = slot - self.first[:, None, None]
            region = self.offset + self.width
            index = inside.clamp(0, region - 1).expand(-1, self.width, -1)
            seen = committed | (self.ancestors.gather(2, index) & (inside >= 0) & (inside < region))
        return torch.zeros(seen.shape, dtype=dtype, device=slot.device).masked_fill_(~seen, torch.finfo(dtype).min)[
            :, None
        ]
