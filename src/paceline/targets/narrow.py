"""Products of few rows with weights in oneDNN's blocks: as fast as memory is, and the same bits as oneDNN's.

oneDNN's kernels for packed weights are made for wide passes. The loops here ask memory ahead of time and keep a few
rows' sums in registers. They read oneDNN's blocks where they lie, or, where weights have no more than 16, 8 or 4 bits
each, a copy that is so much smaller (`compact`).

oneDNN's order of summation is kept: an output is a chain of fused multiply-adds over `chunk` inputs, and chunks are
added in their order. How long chunks are depends on oneDNN's version and the CPU, so `matching_chunk` finds it by
trying.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numba import carray
from torch import Tensor

from paceline.compiled import int64
from paceline.targets.compact import Compact, as_they_are
from paceline.targets.narrow_tile import LANES, TURN, VECTORS, Form, tile
from paceline.targets.narrow_tile import ROWS as TILE_ROWS
from paceline.targets.team import EXACT, Integers, Kernel, floats, part, parts

_CHUNKS = (512, 1024, 256, 2048, 384, 768, 128, 64)

# The table of a product. Sizes in elements.
(
    X,  # [rows, inputs]
    CODES,  # [outputs / panel, rows of codes, panel]
    SCALES,  # [outputs / panel, blocks, scales of a block, panel]
    BIAS,  # [outputs] or 0
    OUT,  # [rows, outputs]
    ROWS,
    INPUTS,
    OUTPUTS,
    PANEL,  # outputs that lie side by side
    CODES_OF_PANEL,  # bytes
    SCALES_OF_PANEL,  # bytes
    CHUNK,
    FIELDS,
) = range(13)


# Of the form of a kernel's weights: put in by `kernel`.
TILE: Any = None
BITS = INPUTS_OF_ROW = BLOCK = SCALES_OF_BLOCK = 1


def _multiply(t: Integers) -> None:
    """out = x W^T + b, of weights in the form that `kernel` puts its globals in for."""
    rows, inputs, outputs, panel = t[ROWS], t[INPUTS], t[OUTPUTS], t[PANEL]
    groups = (rows + TILE_ROWS - 1) // TILE_ROWS
    group = (rows + groups - 1) // groups  # rows of a tile
    units = outputs // LANES
    unit, end = units * int64(part()) // int64(parts()), units * (int64(part()) + 1) // int64(parts())
    while unit < end:
        number, inside = unit * LANES // panel, unit * LANES % panel
        vectors = min(VECTORS[group], end - unit, (panel - inside) // LANES)
        codes = t[CODES] + number * t[CODES_OF_PANEL] + inside * BITS // 8
        scales = t[SCALES] + number * t[SCALES_OF_PANEL] + 4 * inside
        for start in range(0, inputs, t[CHUNK]):
            size = min(t[CHUNK], inputs - start)
            for row in range(0, rows, group):
                TILE(
                    min(group, rows - row),
                    vectors,
                    t[X] + 4 * (row * inputs + start),
                    4 * inputs,
                    codes + start // INPUTS_OF_ROW * panel * BITS // 8,
                    panel,
                    scales + start // BLOCK * SCALES_OF_BLOCK * panel * 4,
                    size,
                    t[OUT] + 4 * (row * outputs + unit * LANES),
                    4 * outputs,
                    int64(start > 0),
                )
        if t[BIAS]:
            bias = carray(floats(t[BIAS]), outputs)
            for row in range(rows):
                out = carray(floats(t[OUT] + 4 * row * outputs), outputs)
                for i in range(unit * LANES, (unit + vectors) * LANES):
                    out[i] += bias[i]
        unit += vectors


@cache
def kernel(form: Form) -> Kernel:
    """`_multiply` for a form: a copy with other globals, since numba would compile a closure anew in every process."""
    own = {
        "TILE": tile(form),
        "BITS": form.bits,
        "INPUTS_OF_ROW": form.inputs,
        "BLOCK": form.block,
        "SCALES_OF_BLOCK": form.scales,
    }
    multiply = FunctionType(_multiply.__code__, globals() | own, f"multiply_{form.name}")
    multiply.__qualname__, multiply.__module__ = f"multiply_{form.name}", __name__
    return Kernel(multiply, EXACT)


class NarrowProduct:
    """`x W^T + b` for up to `widest` rows: from there on oneDNN's kernels are as fast.

    Args:
        weights: of `shape`, outputs and inputs.
        chunk: inputs that oneDNN sums in one chain.
    """

    widest = 32

    def __init__(self, weights: Compact, shape: tuple[int, ...], bias: Tensor | None, chunk: int) -> None:
        self._held, self.outputs, self.kernel = (weights, bias), shape[0], kernel(weights.form)
        self.table = table = np.zeros(FIELDS, dtype=np.int64)  # all of it but X, OUT and ROWS
        codes, scales = weights.codes, weights.scales
        table[CODES], table[BIAS] = codes.data_ptr(), 0 if bias is None else bias.data_ptr()
        table[PANEL], table[CODES_OF_PANEL] = codes.shape[-1], codes[0].nbytes
        if scales is not None:
            table[SCALES], table[SCALES_OF_PANEL] = scales.data_ptr(), scales[0].nbytes
        table[OUTPUTS], table[INPUTS] = shape
        table[CHUNK] = chunk

    @property
    def form(self) -> str:
        return self._held[0].form.name

    @property
    def bytes(self) -> int:
        """That a product reads of its weights."""
        return self._held[0].bytes

    def __call__(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        x = x.contiguous()
        out = x.new_empty(len(x), self.outputs)
        table = self.table.copy()
        table[X], table[OUT], table[ROWS] = x.data_ptr(), out.data_ptr(), len(x)
        self.kernel(table, torch.get_num_threads())
        return out


def matching_chunk(
    blocks: Float[Tensor, "blocks padded panel"],
    shape: tuple[int, ...],
    bias: Tensor | None,
    x: Float[Tensor, "rows in"],
    expected: Float[Tensor, "rows out"],
) -> int:
    """With which length of chunks rows get the bits that oneDNN gave them in a wide pass; 0: with none."""
    outputs, inputs = shape
    if outputs % LANES or inputs % TURN or blocks.shape[2] % LANES:
        return 0
    for chunk in (inputs, *(chunk for chunk in _CHUNKS if chunk < inputs)):
        if torch.equal(NarrowProduct(as_they_are(blocks), shape, bias, chunk)(x), expected):
            return chunk
    return 0
