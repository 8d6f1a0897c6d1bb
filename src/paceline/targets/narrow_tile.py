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
READS_HALVES = bool(_FEATURES.get("f16c") or _FEATURES.get("neon"))  # elsewhere float16 needs a library
ROWS = 6  # of a tile at most
#: Vectors of a tile at most: sums, weights and scales of that many and ROWS stay in 32 wide registers, or 16 others.
VECTORS = 3 if _FEATURES.get("avx512f") else 1
LINE = 4 * LANES  # bytes of a row of codes: a word for each lane
TURN = 8  # inputs a turn of the innermost loop
_AHEAD = 4096  # bytes between what is asked of memory and what is computed

_FLOAT, _LONG, _INT, _BYTE = ir.FloatType(), ir.IntType(64), ir.IntType(32), ir.IntType(8)
_VECTOR, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
Value = Any  # of LLVM
Decode = Callable[[Any, Value, Sequence[Value], int], Value]


class Form(NamedTuple):
    """How weights are stored: rows of words, one for each output of a panel, which hold those of one input or more."""

    name: str
    inputs: int  # of a row
    block: int  # inputs that share scales
    scales: int  # rows of floats a block: factors, offsets
    decode: Decode  # builder, address of a row, scales, which input of the row


def _number(value: int, kind: Any = _LONG) -> Value:
    return ir.Constant(kind, value)


def _load(b: Any, address: Value, kind: Any) -> Value:
    loaded = b.load(b.inttoptr(address, kind.as_pointer()))
    loaded.align = 4
    return loaded


def _store(b: Any, value: Value, address: Value) -> None:
    b.store(value, b.inttoptr(address, _VECTOR.as_pointer())).align = 4


def _at(b: Any, address: Value, *steps: tuple[Value, Value | int]) -> Value:
    """An address and so many steps of so many bytes."""
    for count, size in steps:
        address = b.add(address, b.mul(count, _number(size) if isinstance(size, int) else size))
    return address


def _all(kind: Any, value: int) -> Value:
    return ir.Constant(ir.VectorType(kind, LANES), [value] * LANES)


def _float32(b: Any, row: Value, _scales: Sequence[Value], _which: int) -> Value:
    return _load(b, row, _VECTOR)


def _bfloat16(b: Any, row: Value, _scales: Sequence[Value], which: int) -> Value:
    pair = _load(b, row, _INTS)
    return b.bitcast(b.and_(pair, _all(_INT, 0xFFFF0000)) if which else b.shl(pair, _all(_INT, 16)), _VECTOR)


def _float16(b: Any, row: Value, _scales: Sequence[Value], which: int) -> Value:
    return b.fpext(_load(b, b.add(row, _number(LINE // 2 * which)), ir.VectorType(ir.HalfType(), LANES)), _VECTOR)


def _blocks8(b: Any, row: Value, scales: Sequence[Value], which: int) -> Value:
    number = b.ashr(b.shl(_load(b, row, _INTS), _all(_INT, 24 - 8 * which)), _all(_INT, 24))
    return b.fmul(b.sitofp(number, _VECTOR), scales[0])


def _blocks4(b: Any, row: Value, scales: Sequence[Value], which: int) -> Value:
    digit = b.and_(b.lshr(_load(b, row, _INTS), _all(_INT, 4 * which)), _all(_INT, 15))
    return _fma(b, b.sitofp(digit, _VECTOR), scales[0], scales[1])


FLOAT32 = Form("float32", 1, TURN, 0, _float32)
BFLOAT16 = Form("bfloat16", 2, TURN, 0, _bfloat16)  # the second input's half is the upper one
FLOAT16 = Form("float16", 2, TURN, 0, _float16)  # a row has the first input's halves, then the second's
BLOCKS8 = Form("blocks8", 4, 32, 1, _blocks8)  # factor * code; of the first input in the lowest byte
BLOCKS4 = Form("blocks4", 8, 32, 2, _blocks4)  # factor * digit + offset; of the first input in the lowest four bits


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
    first = b.insert_element(nothing, _load(b, address, _FLOAT), _number(0, _INT))
    return b.shuffle_vector(first, nothing, _all(_INT, 0))


class _Turns:
    """A loop over some inputs of some panels, TURN at a time; within it, `weight` gives those of an input.

    Args:
        ahead: memory is asked for what comes next.
        codes, scales: addresses of the first panel's.
        row, codes_apart, scales_apart: bytes from a row of codes, or a panel's codes or scales, to the next.
    """

    def __init__(
        self,
        b: Any,
        form: Form,
        panels: int,
        ahead: bool,
        codes: Value,
        row: Value,
        codes_apart: Value,
        scales: Value,
        scales_apart: Value,
    ) -> None:
        self._b, self._form, self._row, self._ahead = b, form, row, ahead
        self._codes = [_at(b, codes, (_number(panel), codes_apart)) for panel in range(panels)]
        self._scales = [_at(b, scales, (_number(panel), scales_apart)) for panel in range(panels)]

    def each(self, inputs: Value, body: Callable[[Value], None]) -> None:
        """Run `body` on the number of each turn's first input."""
        b, form = self._b, self._form
        with cgutils.for_range(b, b.udiv(inputs, _number(form.block)), intp=_LONG) as blocks:
            own = [_at(b, scales, (blocks.index, LINE * form.scales)) for scales in self._scales]
            self._shared = [
                [_load(b, b.add(scales, _number(LINE * i)), _VECTOR) for i in range(form.scales)] for scales in own
            ]
            with cgutils.for_range(b, _number(form.block // TURN), intp=_LONG) as turns:
                turn = b.add(b.mul(blocks.index, _number(form.block // TURN)), turns.index)
                rows = TURN // form.inputs
                lines = [_at(b, codes, (b.mul(turn, _number(rows)), self._row)) for codes in self._codes]
                self._lines = [[_at(b, line, (_number(i), self._row)) for i in range(rows)] for line in lines]
                for line in (line for lines in self._lines for line in lines if self._ahead):
                    _ask(b, b.add(line, _number(_AHEAD)))
                body(b.mul(turn, _number(TURN)))

    def weight(self, panel: int, which: int) -> Value:
        """Of the panel's outputs, for this input of the turn."""
        row, inside = divmod(which, self._form.inputs)
        return self._form.decode(self._b, self._lines[panel][row], self._shared[panel], inside)


def _emit_tile(b: Any, rows: int, turns: _Turns, panels: int, places: Sequence[Value]) -> None:
    """The code of one size of tile. Sums stay in registers: LLVM finds that their memory is not needed."""
    x, x_stride, inputs, sums, sums_stride, carries = places
    xs = [_at(b, x, (_number(row), x_stride)) for row in range(rows)]
    zeros = ir.Constant(_VECTOR, [0.0] * LANES)
    starts = [_at(b, sums, (_number(row), sums_stride)) for row in range(rows)]
    outs = [[b.add(start, _number(LINE * i)) for i in range(panels)] for start in starts]
    carried = b.icmp_signed("!=", carries, _number(0))
    held = [[cgutils.alloca_once(b, _VECTOR) for _ in range(panels)] for _ in range(rows)]
    with b.if_else(carried) as (then, otherwise):
        with then:
            for row in range(rows):
                for i in range(panels):
                    b.store(_load(b, outs[row][i], _VECTOR), held[row][i])
        with otherwise:
            for place in (place for row in held for place in row):
                b.store(zeros, place)

    def body(first: Value) -> None:
        for which in range(TURN):
            weights = [turns.weight(panel, which) for panel in range(panels)]
            for row in range(rows):
                value = _broadcast(b, _at(b, b.add(xs[row], _number(4 * which)), (first, 4)))
                for i in range(panels):
                    b.store(_fma(b, weights[i], value, b.load(held[row][i])), held[row][i])

    turns.each(inputs, body)
    for row in range(rows):
        for i in range(panels):
            _store(b, b.load(held[row][i]), outs[row][i])


def tile(form: Form, ahead: bool = True) -> Any:
    """A function for compiled code; all arguments are int64, `x`, `codes`, `scales` and `sums` addresses, others bytes.

    It adds up `[rows, LANES * panels]` sums over some inputs, beginning with what is there if `carries`, else with 0.
    """

    def code(
        _typing: Any,
        rows: Any,
        panels: Any,
        codes: Any,
        row: Any,
        codes_apart: Any,
        scales: Any,
        scales_apart: Any,
        x: Any,
        x_stride: Any,
        inputs: Any,
        sums: Any,
        sums_stride: Any,
        carries: Any,
    ) -> Any:
        def generate(context: Any, b: Any, _signature: Any, arguments: Sequence[Value]) -> Any:
            rows, panels, *weights = arguments[:7]
            done = b.append_basic_block("done")
            choice = b.switch(b.add(b.mul(rows, _number(VECTORS + 1)), panels), done)
            for count in range(1, ROWS + 1):
                for wide in range(1, VECTORS + 1):
                    block = b.append_basic_block(f"tile_{count}_{wide}")
                    choice.add_case(_number((VECTORS + 1) * count + wide), block)
                    b.position_at_end(block)
                    _emit_tile(b, count, _Turns(b, form, wide, ahead, *weights), wide, arguments[7:])
                    b.branch(done)
            b.position_at_end(done)
            return context.get_dummy_value()

        kinds = rows, panels, codes, row, codes_apart, scales, scales_apart
        return types.void(*kinds, x, x_stride, inputs, sums, sums_stride, carries), generate

    return intrinsic(code)


def spread(form: Form) -> Any:
    """A function for compiled code: a panel's weights for some inputs, as floats, `[inputs, LANES]`."""

    def code(_typing: Any, codes: Any, row: Any, scales: Any, inputs: Any, out: Any) -> Any:
        def generate(context: Any, b: Any, _signature: Any, arguments: Sequence[Value]) -> Any:
            codes, row, scales, inputs, out = arguments
            turns = _Turns(b, form, 1, True, codes, row, _number(0), scales, _number(0))

            def body(first: Value) -> None:
                for which in range(TURN):
                    _store(b, turns.weight(0, which), _at(b, b.add(out, _number(LINE * which)), (first, LINE)))

            turns.each(inputs, body)
            return context.get_dummy_value()

        return types.void(codes, row, scales, inputs, out), generate

    return intrinsic(code)


def memory(size: int) -> Any:
    """A function for compiled code: the address of so many bytes of the thread's own, as long as it runs."""

    def code(_typing: Any) -> Any:
        def generate(_context: Any, b: Any, _signature: Any, _arguments: Sequence[Value]) -> Any:
            place = cgutils.alloca_once(b, ir.ArrayType(_VECTOR, size // LINE))
            return b.ptrtoint(place, _LONG)

        return types.int64(), generate

    return intrinsic(code)
