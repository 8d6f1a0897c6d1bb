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
from numba import carray, njit
from torch import Tensor

from paceline.compiled import int64
from paceline.targets.compact import Compact, as_they_are
from paceline.targets.narrow_tile import FLOAT32, LANES, LINE, TURN, VECTORS, Form, memory, spread, tile
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

MOST = 128  # rows
PIECE = 192 if VECTORS == 1 else 96  # inputs whose weights are floats at a time, in the first cache

# Of the form of a kernel's weights: put in by `kernel`.
TILE: Any = None
SPREAD: Any = None
INPUTS_OF_ROW = BLOCK = SCALES_OF_BLOCK = 1
ROW = 0  # bytes from a row of codes to the next; 0: as PANEL says

_float_tile = tile(FLOAT32, ahead=False)
_sums, _weights = memory(MOST * VECTORS * LINE), memory(PIECE * VECTORS * LINE)


def _multiply(t: Integers) -> None:
    """out = x W^T + b, of weights in the form that `kernel` puts its globals in for.

    A thread goes through its outputs by some vectors at a time. The rows of one tile take weights as they are stored.
    For more rows weights become floats first, some inputs at a time, and sums go on from one such piece to the next.
    """
    rows, inputs, panel = t[ROWS], t[INPUTS], t[PANEL]
    x_stride, row = 4 * inputs, ROW or 4 * panel
    tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    units = t[OUTPUTS] // LANES
    unit, end = units * int64(part()) // int64(parts()), units * (int64(part()) + 1) // int64(parts())
    sums, weights = _sums(), _weights()
    while unit < end:
        number, inside = unit * LANES // panel, unit * LANES % panel
        vectors, apart = min(int64(VECTORS), end - unit), t[CODES_OF_PANEL]  # bytes from one's codes to the next's
        if panel > LANES:
            vectors, apart = min(vectors, (panel - inside) // LANES), int64(LINE)
        stride = LINE * vectors
        codes, scales = t[CODES] + number * t[CODES_OF_PANEL] + 4 * inside, t[SCALES] + number * t[SCALES_OF_PANEL]
        for start in range(0, inputs, t[CHUNK]):
            stop = min(inputs, start + t[CHUNK])
            for at in range(start, stop, PIECE if tiles > 1 else stop - start):
                size = min(PIECE, stop - at) if tiles > 1 else stop - start
                some, x, carries = codes + at // INPUTS_OF_ROW * row, t[X] + 4 * at, int64(at > start)
                factors, factors_apart = scales + at // BLOCK * SCALES_OF_BLOCK * LINE, t[SCALES_OF_PANEL]
                if tiles == 1:
                    stored = some, row, apart, factors, factors_apart
                    TILE(rows, vectors, *stored, x, x_stride, size, sums, stride, carries)
                    continue
                for i in range(vectors):
                    SPREAD(some + i * apart, row, factors + i * factors_apart, size, weights + i * PIECE * LINE)
                for i in range(tiles):
                    first, after = rows * i // tiles, rows * (i + 1) // tiles
                    own, own_sums = x + x_stride * first, sums + stride * first
                    stored = weights, int64(LINE), int64(PIECE * LINE), int64(0), int64(0)
                    _float_tile(after - first, vectors, *stored, own, x_stride, size, own_sums, stride, carries)
            _add_up(t, unit * LANES, vectors * LANES, sums, start > 0, stop == inputs)
        unit += vectors


@njit(**EXACT)
def _add_up(t: Integers, first: int, count: int, sums: int, adds: bool, ends: bool) -> None:
    """Put the sums of a chunk of inputs, `[rows, count]`, into their place; if `adds`, on top of those before."""
    for row in range(t[ROWS]):
        out = carray(floats(t[OUT] + 4 * (row * t[OUTPUTS] + first)), count)
        some = carray(floats(sums + 4 * row * count), count)
        for i in range(count):
            out[i] = out[i] + some[i] if adds else some[i]
        if ends and t[BIAS]:
            bias = carray(floats(t[BIAS] + 4 * first), count)
            for i in range(count):
                out[i] += bias[i]


@cache
def kernel(form: Form) -> Kernel:
    """`_multiply` for a form: a copy with other globals, since numba would compile a closure anew in every process."""
    own = {
        "TILE": tile(form),
        "SPREAD": spread(form),
        "INPUTS_OF_ROW": form.inputs,
        "ROW": 0 if form is FLOAT32 else LINE,
        "BLOCK": form.block,
        "SCALES_OF_BLOCK": form.scales,
    }
    multiply = FunctionType(_multiply.__code__, globals() | own, f"multiply_{form.name}")
    multiply.__qualname__, multiply.__module__ = f"multiply_{form.name}", __name__
    return Kernel(multiply, EXACT)


class NarrowProduct:
    """`x W^T + b` for up to `widest` rows; more are left to oneDNN.

    Args:
        weights: of `shape`, outputs and inputs.
        chunk: inputs that oneDNN sums in one chain.
    """

    widest = MOST

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
