"""The innermost loops of `narrow`: LLVM's code for a tile of outputs, from weights in any of several forms.

LLVM's vectors become those of any CPU, by numba's compiler: no other is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16  # of a vector; a CPU with shorter ones takes several registers for it
_FEATURES = binding.get_host_cpu_features()
WIDE = bool(_FEATURES.get("avx512f"))
READS_HALVES = bool(_FEATURES.get("f16c") or _FEATURES.get("neon"))  # elsewhere float16 needs a library
ROWS = 6  # of a tile at most
_REGISTERS = 32 if WIDE else 8  # vectors of LANES that they hold
VECTORS = (0, *(max(v for v in (4, 2, 1) if (rows + 1) * v < _REGISTERS) for rows in range(1, ROWS + 1)))
_AHEAD = 4096  # bytes between what is asked of memory and what is computed
TURN = 2  # inputs a turn of the innermost loop

_FLOAT, _LONG, _INT, _BYTE = ir.FloatType(), ir.IntType(64), ir.IntType(32), ir.IntType(8)
_VECTOR, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
Value = Any  # of LLVM
Decode = Callable[[Any, Value, Sequence[Value], int], Value]


class Form(NamedTuple):
    """How weights are stored: rows of codes, each of all outputs of a panel, for one input or more."""

    name: str
    bits: int  # of a code
    inputs: int  # of a row of codes
    block: int  # inputs that share scales
    scales: int  # rows of floats a block: factors, offsets
    decode: Decode  # builder, address of codes, scales, which input of the row


def _number(value: int, kind: Any = _LONG) -> Value:
    return ir.Constant(kind, value)


def _load(b: Any, address: Value, kind: Any, align: int = 1) -> Value:
    loaded = b.load(b.inttoptr(address, kind.as_pointer()))
    loaded.align = align
    return loaded


def _all(kind: Any, value: int) -> Value:
    return ir.Constant(ir.VectorType(kind, LANES), [value] * LANES)


def _float32(b: Any, codes: Value, _scales: Sequence[Value], _which: int) -> Value:
    return _load(b, codes, _VECTOR, 4)


def _bfloat16(b: Any, codes: Value, _scales: Sequence[Value], _which: int) -> Value:
    halves = b.zext(_load(b, codes, ir.VectorType(ir.IntType(16), LANES), 2), _INTS)
    return b.bitcast(b.shl(halves, _all(_INT, 16)), _VECTOR)


def _float16(b: Any, codes: Value, _scales: Sequence[Value], _which: int) -> Value:
    return b.fpext(_load(b, codes, ir.VectorType(ir.HalfType(), LANES), 2), _VECTOR)


def _blocks8(b: Any, codes: Value, scales: Sequence[Value], _which: int) -> Value:
    numbers = b.sitofp(b.sext(_load(b, codes, ir.VectorType(_BYTE, LANES)), _INTS), _VECTOR)
    return b.fmul(numbers, scales[0])


def _blocks4(b: Any, codes: Value, scales: Sequence[Value], which: int) -> Value:
    both = _load(b, codes, ir.VectorType(_BYTE, LANES))
    digits = b.lshr(both, _all(_BYTE, 4)) if which else b.and_(both, _all(_BYTE, 15))
    return _fma(b, b.sitofp(b.zext(digits, _INTS), _VECTOR), scales[0], scales[1])


FLOAT32 = Form("float32", 32, 1, TURN, 0, _float32)
BFLOAT16 = Form("bfloat16", 16, 1, TURN, 0, _bfloat16)
FLOAT16 = Form("float16", 16, 1, TURN, 0, _float16)
BLOCKS8 = Form("blocks8", 8, 1, 32, 1, _blocks8)  # factor * code
BLOCKS4 = Form("blocks4", 8, 2, 32, 2, _blocks4)  # factor * digit + offset; low digits are of even inputs


def _fma(b: Any, x: Value, y: Value, z: Value) -> Value:
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.fma.v{LANES}f32"), [x, y, z])


def _ask(b: Any, address: Value) -> None:
    """For the line of memory at an address: to read, into the first cache."""
    byte = _BYTE.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _INT, _INT, _INT])
    flags = [_number(flag, _INT) for flag in (0, 3, 1)]
    b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch"), [b.inttoptr(address, byte), *flags])


def _broadcast(b: Any, address: Value) -> Value:
    nothing = ir.Constant(_VECTOR, ir.Undefined)
    first = b.insert_element(nothing, _load(b, address, _FLOAT, 4), _number(0, _INT))
    return b.shuffle_vector(first, nothing, _all(_INT, 0))


def _emit(b: Any, form: Form, rows: int, vectors: int, places: Sequence[Value]) -> None:
    """The code of one size of tile. Sums stay in registers: LLVM finds that their memory is not needed."""
    x, x_stride, codes, panel, scales, inputs, out, out_stride, adds = places
    row_bytes = b.mul(panel, _number(form.bits // 8))  # of codes
    scale_bytes = b.mul(panel, _number(4))
    sums = [
        [cgutils.alloca_once_value(b, ir.Constant(_VECTOR, [0.0] * LANES)) for _ in range(vectors)] for _ in range(rows)
    ]
    for place in (place for row in sums for place in row):
        b.store(ir.Constant(_VECTOR, [0.0] * LANES), place)
    with cgutils.for_range(b, b.udiv(inputs, _number(form.block)), intp=_LONG) as blocks:
        own = b.add(scales, b.mul(b.mul(blocks.index, _number(form.scales)), scale_bytes))
        shared = [
            [
                _load(b, b.add(b.add(own, b.mul(scale_bytes, _number(i))), _number(4 * LANES * v)), _VECTOR, 4)
                for i in range(form.scales)
            ]
            for v in range(vectors)
        ]
        with cgutils.for_range(b, _number(form.block // TURN), intp=_LONG) as turns:
            first = b.add(b.mul(blocks.index, _number(form.block)), b.mul(turns.index, _number(TURN)))
            for step in range(TURN):
                at = b.add(first, _number(step))
                line = b.add(codes, b.mul(b.udiv(at, _number(form.inputs)), row_bytes))
                if step % form.inputs == 0:
                    for begin in range(0, vectors * LANES * form.bits // 8, 64):
                        _ask(b, b.add(line, _number(_AHEAD + begin)))
                read = [
                    form.decode(b, b.add(line, _number(v * LANES * form.bits // 8)), shared[v], step % form.inputs)
                    for v in range(vectors)
                ]
                for row in range(rows):
                    value = _broadcast(b, b.add(b.add(x, b.mul(x_stride, _number(row))), b.mul(at, _number(4))))
                    for v in range(vectors):
                        b.store(_fma(b, read[v], value, b.load(sums[row][v])), sums[row][v])
    adding = b.icmp_signed("!=", adds, _number(0))
    for row in range(rows):
        for v in range(vectors):
            place = b.add(b.add(out, b.mul(out_stride, _number(row))), _number(4 * LANES * v))
            total = b.load(sums[row][v])
            total = b.select(adding, b.fadd(_load(b, place, _VECTOR, 4), total), total)
            b.store(total, b.inttoptr(place, _VECTOR.as_pointer())).align = 4


def tile(form: Form) -> Any:
    """A function for compiled code; all arguments are int64, `x`, `codes`, `scales` and `out` addresses, strides bytes.

    It computes `[rows, LANES * vectors]` outputs over some inputs; if `adds`, on top of what is there.
    """

    def code(
        _typing: Any,
        rows: Any,
        vectors: Any,
        x: Any,
        x_stride: Any,
        codes: Any,
        panel: Any,
        scales: Any,
        inputs: Any,
        out: Any,
        out_stride: Any,
        adds: Any,
    ) -> Any:
        def generate(context: Any, b: Any, _signature: Any, arguments: Sequence[Value]) -> Any:
            rows, vectors, *places = arguments
            done = b.append_basic_block("done")
            choice = b.switch(b.add(b.mul(rows, _number(8)), vectors), done)
            for count in range(1, ROWS + 1):
                for wide in range(1, VECTORS[count] + 1):
                    block = b.append_basic_block(f"tile_{count}_{wide}")
                    choice.add_case(_number(8 * count + wide), block)
                    b.position_at_end(block)
                    _emit(b, form, count, wide, places)
                    b.branch(done)
            b.position_at_end(done)
            return context.get_dummy_value()

        return types.void(rows, vectors, x, x_stride, codes, panel, scales, inputs, out, out_stride, adds), generate

    return intrinsic(code)
