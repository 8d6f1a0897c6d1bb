"""Which outputs of a matrix may be the largest, as products in 8 bits tell: likeliest.cpp has the why."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from jaxtyping import Float
from torch import Tensor

from paceline.targets.native.blocks import SOME
from paceline.targets.native.build import library
from paceline.targets.native.structures import CRough
from paceline.targets.native.weights import BLOCK, FLOATS, PANEL, Kind, Packed, pointer

MARGIN = 1.001  # lengths are sums in floats


@dataclass(frozen=True)
class Rough:
    """Of a matrix whose products read floats.

    Attributes:
        matrix: its weights in blocks: itself, or blocks of 8 bits near it.
        lengths: of the longest row in each panel, or a little more.
        off: how far the farthest row in each panel is from its blocks, or a little more; None: they are the same.
    """

    matrix: Packed
    lengths: Float[Tensor, " panels"]
    off: Float[Tensor, " panels"] | None = None

    @classmethod
    def of(cls, matrix: Packed) -> Rough | None:
        """None where inputs are rounded already, or rows are no whole blocks."""
        if matrix.next or matrix.c.input_kind != Kind.F32 or matrix.c.inputs % BLOCK:
            return None
        lengths = torch.empty(-(-matrix.outputs // PANEL))
        if matrix.kind not in FLOATS:
            library().paceline_lengths(ctypes.byref(matrix.c), lengths.data_ptr())
            return cls(matrix, lengths)
        blocks, off = Packed(Kind.Q8_0, matrix.c.inputs, [matrix.outputs]), torch.empty_like(lengths)
        for places in torch.arange(matrix.outputs).split(SOME // PANEL * PANEL):
            rows, panels = matrix.rows(places), slice(int(places[0]) // PANEL, int(places[-1]) // PANEL + 1)
            blocks.write(torch.from_numpy(quantize(rows.numpy(), GGMLQuantizationType.Q8_0)), places)
            lengths[panels] = _longest(rows)
            off[panels] = _longest(rows - blocks.rows(places))
        return cls(blocks, lengths, off)

    @cached_property
    def c(self) -> CRough:
        """Points into this."""
        return CRough(ctypes.addressof(self.matrix.c), pointer(self.lengths), pointer(self.off))


def _longest(rows: Float[Tensor, "rows inputs"]) -> Float[Tensor, " panels"]:
    """Of every panel."""
    lengths = torch.zeros(-(-len(rows) // PANEL) * PANEL)
    lengths[: len(rows)] = rows.norm(dim=1)
    return MARGIN * lengths.view(-1, PANEL).amax(1)
