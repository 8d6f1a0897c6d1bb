"""Matrices as a checkpoint stores them, and packed as the C++ pass reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from paceline.targets.native.build import library
from paceline.targets.native.memory import Arena

BLOCK = 32  # inputs are padded to whole blocks; the least that blocks of the GGUF formats have
PANEL = 16  # outputs that are stored side by side
MAX_PARTS = 3  # matrices that follow one another, of native.h
LANES = 8


class Kind(IntEnum):
    """How weights are stored; the values are those of native.h."""

    F32 = 0
    BF16 = 1
    Q8_0 = 2
    Q4_0 = 3
    Q4_1 = 4
    F16 = 5
    Q5_0 = 6
    Q5_1 = 7
    Q2_K = 8
    Q3_K = 9
    Q4_K = 10
    Q5_K = 11
    Q6_K = 12


FLOATS = {Kind.F32: torch.float32, Kind.BF16: torch.bfloat16, Kind.F16: torch.float16}


class Rows(NamedTuple):
    """A matrix row by row, as floats, bfloat16 or GGUF blocks."""

    kind: Kind
    inputs: int
    data: UInt8[Tensor, "outputs row_bytes"]

    @classmethod
    def of(cls, weight: Float[Tensor, "outputs inputs"]) -> Rows:
        """Of a matrix in float32, bfloat16 or float16; shares its memory where that is contiguous."""
        kind = next(kind for kind, dtype in FLOATS.items() if dtype == weight.dtype)
        return cls(kind, weight.shape[1], weight.contiguous().view(torch.uint8))


class CMatrix(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("input_kind", ctypes.c_int32),
        ("near", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("next", ctypes.c_void_p),
    )


class Packed:
    """One matrix made of several over the same inputs, in the layout of storage.h.

    Args:
        parts: the outputs of each. They lie one below the other, or `interleaved` (parts of equal size): eight
            outputs of each by turns, filled up with zeros, which is how the pass wants the MLP's gate and up.
        arena: where its memory comes from; without one it gets its own.
        input_kind: F32; or BF16: products round their inputs to bfloat16. See also `round_inputs`.

    Attributes:
        next: the outputs that follow, stored as another kind.
    """

    def __init__(
        self,
        kind: Kind,
        inputs: int,
        parts: Sequence[int],
        interleaved: bool = False,
        arena: Arena | None = None,
        input_kind: Kind = Kind.F32,
    ) -> None:
        self._parts, self._interleaved = tuple(parts), interleaved
        filled = [-(-size // LANES) * LANES if interleaved else size for size in parts]
        self.kind = kind
        self.c = CMatrix(kind, sum(filled), inputs, input_kind, kind == Kind.Q4_1, None, None, None)
        self.bytes: int = library().paceline_packed_bytes(ctypes.byref(self.c))
        self._memory, self._bias = (arena or Arena()).take(self.bytes), torch.empty(0)
        self.c.data = self._memory.data_ptr()
        self.next: Packed | None = None

    def then(self, following: Packed) -> None:
        """Outputs of another kind come after these; `MAX_PARTS` matrices in all at most."""
        self.next, self.c.next = following, ctypes.addressof(following.c)

    def round_inputs(self, kind: Kind = Kind.Q8_0) -> bool:
        """Products round their inputs from now on, if weights are in blocks in the whole chain: to blocks of 8 bits
        (Q8_0) or to bfloat16.
        """
        if any(matrix.kind in FLOATS for matrix in self.chain):
            return False
        for matrix in self.chain:
            matrix.c.input_kind = kind
        return True

    @property
    def chain(self) -> list[Packed]:
        """This matrix and those that follow."""
        return [self, *(self.next.chain if self.next else ())]

    def __getstate__(self) -> dict[str, Any]:
        """All but addresses, which the next process has others of."""
        return vars(self) | {"c": [getattr(self.c, name) for name, kind in CMatrix._fields_ if not _points(kind)]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        numbers = iter(state["c"])
        self.c = CMatrix(*(None if _points(kind) else next(numbers) for _, kind in CMatrix._fields_))
        self.c.data = self._memory.data_ptr()
        self.c.bias = self._bias.data_ptr() if len(self._bias) else None
        if self.next:
            self.then(self.next)

    @property
    def outputs(self) -> int:
        return int(self.c.outputs)

    def places(self, part: int) -> Int[Tensor, " rows"]:
        """The outputs that the rows of a part have become."""
        row = torch.arange(self._parts[part])
        if not self._interleaved:
            return sum(self._parts[:part]) + row
        return (row // LANES * len(self._parts) + part) * LANES + row % LANES

    def write(self, rows: UInt8[Tensor, "rows row_bytes"], places: Int[Tensor, " rows"]) -> None:
        rows, places = rows.contiguous(), places.contiguous()
        matrix, packed = ctypes.byref(self.c), self._memory.data_ptr()
        self.c.near &= library().paceline_pack(
            matrix, rows.data_ptr(), rows.shape[1], places.data_ptr(), len(rows), packed
        )

    def set_bias(self, biases: Sequence[Float[Tensor, " rows"]]) -> None:
        self._bias = torch.zeros(self.outputs)
        for part, bias in enumerate(biases):
            self._bias[self.places(part)] = bias.float()
        self.c.bias = self._bias.data_ptr()

    def rows(self, places: Int[Tensor, " rows"]) -> Float[Tensor, "rows inputs"]:
        """The weights of some outputs, as floats. Raises IndexError for one that is not there."""
        places = places.to(torch.int64).contiguous()
        out = torch.empty(len(places), self.c.inputs)
        if not library().paceline_rows(ctypes.byref(self.c), places.data_ptr(), len(places), out.data_ptr()):
            raise IndexError(f"an index is outside 0 .. {self.outputs - 1}")
        return out


def _points(kind: type) -> bool:
    return kind is ctypes.c_void_p


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
