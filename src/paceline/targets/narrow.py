"""Products of few rows with weights in oneDNN's blocks: as fast as memory is, and the same bits as oneDNN's.

oneDNN's kernels for packed weights are made for wide passes; over a few rows they read at two thirds of what memory
gives. These loops read the same blocks, ask for them ahead of time, and keep a few rows' sums in registers. They are
written as LLVM's vectors, which numba's compiler turns into those of any CPU: no other compiler is needed.

oneDNN's order of summation is kept: an output is a chain of fused multiply-adds over `chunk` inputs, and chunks are
added in their order. How long chunks are depends on oneDNN's version and the CPU, so `matching` finds it by trying.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from llvmlite import binding, ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from paceline.compiled import int64
from paceline.targets.team import EXACT, Integers, Kernel, floats, part, parts

LANES = 16  # of one of LLVM's vectors; a CPU with shorter ones takes several registers for it
_AHEAD = 4096  # bytes between what is asked of memory and what is computed
_UNROLL = 2  # inputs a turn of the innermost loop
_REGISTERS = 32 if binding.get_host_cpu_features().get("avx512f") else 8  # vectors of LANES that they hold
_CHUNKS = (512, 1024, 256, 2048, 384, 768, 128, 64)

# The table of a product. Sizes in elements.
(
    X,  # [rows, inputs]
    BLOCKS,  # [outputs / panel, padded inputs, panel]
    BIAS,  # [outputs] or 0
    OUT,  # [rows, outputs]
    ROWS,
    INPUTS,
    OUTPUTS,
    PADDED,  # inputs of a block
    PANEL,  # outputs of a block
    CHUNK,
    FIELDS,
) = range(11)


_ROWS = 6  # of a tile; more are several, which find the weights in a cache
_VECTORS = (0, *(max(v for v in (4, 2, 1) if (rows + 1) * v < _REGISTERS) for rows in range(1, _ROWS + 1)))


def _tile_code(
    _typing: Any,
    rows: Any,
    vectors: Any,
    x: Any,
    x_stride: Any,
    weights: Any,
    weights_stride: Any,
    inputs: Any,
    out: Any,
    out_stride: Any,
    adds: Any,
) -> Any:
    """A tile of outputs, [rows, LANES * vectors], over some inputs; if `adds`, on top of what is there. Places are
    addresses, strides are bytes.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Sequence[Any]) -> Any:
        rows, vectors, *places = arguments
        done = builder.append_basic_block("done")
        choice = builder.switch(builder.add(builder.mul(rows, _long(8)), vectors), done)
        for count in range(1, _ROWS + 1):
            for wide in range(1, _VECTORS[count] + 1):
                block = builder.append_basic_block(f"tile_{count}_{wide}")
                choice.add_case(_long(8 * count + wide), block)
                builder.position_at_end(block)
                _emit(builder, count, wide, *places)
                builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    signature = types.void(rows, vectors, x, x_stride, weights, weights_stride, inputs, out, out_stride, adds)
    return signature, generate


_tile: Any = intrinsic(_tile_code)
_FLOAT, _LONG, _INT = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_VECTOR, _BYTE = ir.VectorType(_FLOAT, LANES), ir.IntType(8).as_pointer()


def _long(value: int) -> Any:
    return ir.Constant(_LONG, value)


def _emit(b: Any, rows: int, vectors: int, *places: Any) -> None:
    """The code of one size of tile: a loop over the inputs, its sums in registers."""
    x, x_stride, weights, weights_stride, inputs, out, out_stride, adds = places
    fma = cgutils.get_or_insert_function(b.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{LANES}f32")
    ask = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(ir.VoidType(), [_BYTE, _INT, _INT, _INT]), "llvm.prefetch"
    )

    def at(address: Any, offset: Any, kind: Any) -> Any:
        return b.inttoptr(b.add(address, offset), kind)

    def load(address: Any, vector: int) -> Any:
        loaded = b.load(at(address, _long(4 * LANES * vector), _VECTOR.as_pointer()))
        loaded.align = 4
        return loaded

    def broadcast(address: Any, offset: Any) -> Any:
        number = b.load(at(address, offset, _FLOAT.as_pointer()))
        first = b.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, ir.Constant(_INT, 0))
        lanes = ir.Constant(ir.VectorType(_INT, LANES), [0] * LANES)
        return b.shuffle_vector(first, ir.Constant(_VECTOR, ir.Undefined), lanes)

    before, loop, after = b.block, b.append_basic_block("inputs"), b.append_basic_block("sums")
    lines = [b.add(x, b.mul(x_stride, _long(row))) for row in range(rows)]
    b.branch(loop)
    b.position_at_end(loop)
    at_input = b.phi(_LONG)
    at_input.add_incoming(_long(0), before)
    sums = [[b.phi(_VECTOR) for _ in range(vectors)] for _ in range(rows)]
    for phi in (phi for row in sums for phi in row):
        phi.add_incoming(ir.Constant(_VECTOR, [0.0] * LANES), before)
    totals: list[list[Any]] = [list(row) for row in sums]
    for step in range(_UNROLL):
        number = b.add(at_input, _long(step))
        line = b.add(weights, b.mul(number, weights_stride))
        for vector in range(vectors):
            place = at(line, _long(_AHEAD + 4 * LANES * vector), _BYTE)
            b.call(ask, [place, *(ir.Constant(_INT, flag) for flag in (0, 3, 1))])  # to read, into the first cache
        read = [load(line, vector) for vector in range(vectors)]
        offset = b.mul(number, _long(4))
        for row in range(rows):
            value = broadcast(lines[row], offset)
            totals[row] = [b.call(fma, [read[i], value, totals[row][i]]) for i in range(vectors)]
    following = b.add(at_input, _long(_UNROLL))
    at_input.add_incoming(following, b.block)
    for phis, values in zip(sums, totals, strict=True):
        for phi, value in zip(phis, values, strict=True):
            phi.add_incoming(value, b.block)
    b.cbranch(b.icmp_signed("<", following, inputs), loop, after)
    b.position_at_end(after)
    adding = b.icmp_signed("!=", adds, _long(0))
    for row in range(rows):
        target = b.add(out, b.mul(out_stride, _long(row)))
        for vector in range(vectors):
            value = totals[row][vector]
            value = b.select(adding, b.fadd(load(target, vector), value), value)
            b.store(value, at(target, _long(4 * LANES * vector), _VECTOR.as_pointer())).align = 4


@njit(inline="always")
def _share(t: Integers) -> tuple[int, int]:
    """Which of all vectors of outputs this thread computes."""
    units = t[OUTPUTS] // LANES
    return units * int64(part()) // int64(parts()), units * (int64(part()) + 1) // int64(parts())


@partial(Kernel, arithmetic=EXACT)
def multiply(t: Integers) -> None:
    """out = x W^T + b."""
    rows, inputs, outputs, panel = t[ROWS], t[INPUTS], t[OUTPUTS], t[PANEL]
    groups = (rows + _ROWS - 1) // _ROWS
    group = (rows + groups - 1) // groups  # rows of a tile
    unit, end = _share(t)
    while unit < end:
        inside = unit * LANES % panel
        vectors = min(_VECTORS[group], end - unit, (panel - inside) // LANES)
        weights = t[BLOCKS] + 4 * (unit * LANES // panel * t[PADDED] * panel + inside)
        for start in range(0, inputs, t[CHUNK]):
            size = min(t[CHUNK], inputs - start)
            for row in range(0, rows, group):
                _tile(
                    min(group, rows - row),
                    vectors,
                    t[X] + 4 * (row * inputs + start),
                    4 * inputs,
                    weights + 4 * start * panel,
                    4 * panel,
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


class NarrowProduct:
    """`x W^T + b` for up to `widest` rows: from there on oneDNN's kernels are as fast.

    Args:
        blocks: oneDNN's, read where they lie.
        chunk: inputs that oneDNN sums in one chain.
    """

    widest = 32 if _REGISTERS == 32 else 12

    def __init__(
        self, blocks: Float[Tensor, "blocks padded panel"], shape: tuple[int, ...], bias: Tensor | None, chunk: int
    ) -> None:
        self._held, self.outputs = (blocks, bias), shape[0]
        self.table = table = np.zeros(FIELDS, dtype=np.int64)  # all of it but X, OUT and ROWS
        table[BLOCKS], table[BIAS] = blocks.data_ptr(), 0 if bias is None else bias.data_ptr()
        table[OUTPUTS], table[INPUTS] = shape
        table[PADDED], table[PANEL], table[CHUNK] = *blocks.shape[1:], chunk

    def __call__(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        x = x.contiguous()
        out = x.new_empty(len(x), self.outputs)
        table = self.table.copy()
        table[X], table[OUT], table[ROWS] = x.data_ptr(), out.data_ptr(), len(x)
        multiply(table, torch.get_num_threads())
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
    if outputs % LANES or inputs % _UNROLL or blocks.shape[2] % LANES:
        return 0
    for chunk in (inputs, *(chunk for chunk in _CHUNKS if chunk < inputs)):
        if torch.equal(NarrowProduct(blocks, shape, bias, chunk)(x), expected):
            return chunk
    return 0
