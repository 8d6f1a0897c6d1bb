"""The quantised matrices of a GGUF file, by the names and in the row order of Hugging Face."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from paceline.errors import IntegrityError
from paceline.targets.native.weights import FLOATS, Kind

_SUPPORTED = {GGMLQuantizationType[kind.name]: kind for kind in Kind if kind not in FLOATS}
_FORMATS = {"UINT8": "B", "INT8": "b", "UINT16": "H", "INT16": "h", "UINT32": "I", "INT32": "i", "FLOAT32": "f"}
_FORMATS |= {"BOOL": "?", "UINT64": "Q", "INT64": "q", "FLOAT64": "d"}
SOME = 512  # rows at a time, so that nothing large is copied


class Blocks:
    """A GGUF file's tensors as they are stored.

    Args:
        heads: number of heads of the modules that have any, by the last part of their names.

    Raises:
        IntegrityError: the file cannot be read.
    """

    def __init__(self, path: Path, layers: int, heads: Mapping[str, int]) -> None:
        try:
            with path.open("rb") as file:
                self._directory = _Directory(file)
        except (OSError, ValueError, struct.error) as error:
            raise IntegrityError(f"{path} cannot be read: {error}") from error
        self._path = path
        self.architecture = self._directory.architecture
        known = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture)
        self._names = gguf.get_tensor_name_map(known, layers)
        self._permuted = heads if self.architecture == "llama" else {}

    def matrix(self, name: str) -> BlockMatrix | None:
        """That of the module `name`; None if it is not there."""
        found = self._directory.tensors.get(f"{self._names.get_name(name)}.weight")
        if found is None:
            return None
        order = torch.arange(prod(found.shape[1:]))
        if heads := self._permuted.get(name.rpartition(".")[2]):
            # llama.cpp rotates neighbouring dimensions, Hugging Face the halves of a head
            order = order.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten()
        return BlockMatrix(self._path, found, order)

    def vector(self, name: str) -> Float[Tensor, " size"] | None:
        """The norm's weight or the bias that Hugging Face has under this name; None if it is not there."""
        module, _, kind = name.rpartition(".")
        found = self._directory.tensors.get(f"{self._names.get_name(module)}.{kind}")
        return BlockMatrix(self._path, found, torch.arange(1)).floats(0, 1)[0] if found else None


class BlockMatrix:
    """A matrix in the file, read some rows at a time.

    Attributes:
        kind: None: not one that the native tier reads as it is.
        order: the row of Hugging Face's matrix that each row of the file is.
    """

    def __init__(self, path: Path, place: _Tensor, order: Int[Tensor, " rows"]) -> None:
        self._path, self._offset, self._type, self.order = path, place.offset, place.type, order
        self.kind, self.inputs = _SUPPORTED.get(place.type), place.shape[0]
        block, size = gguf.GGML_QUANT_SIZES[place.type]
        self._row_bytes = self.inputs // block * size

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.order), self.inputs

    def read(self, first: int, count: int) -> UInt8[Tensor, "count row_bytes"]:
        """Rows of the file. Not mapped: its pages would stay in memory."""
        size = self._row_bytes
        flat = np.fromfile(self._path, np.uint8, count * size, offset=self._offset + first * size)
        return torch.from_numpy(flat).view(count, size)

    def floats(self, first: int, count: int) -> Float[Tensor, "count inputs"]:
        """Rows of the file, as `gguf` dequantises them."""
        return torch.from_numpy(dequantize(self.read(first, count).numpy(), self._type).copy())

    def pieces(self) -> Iterator[tuple[Int[Tensor, " some"], Float[Tensor, "some inputs"]]]:
        """All rows, some at a time, and which of Hugging Face's they are."""
        first = 0
        for rows in self.order.split(SOME):
            yield rows, self.floats(first, len(rows))
            first += len(rows)

    def whole(self) -> Float[Tensor, "rows inputs"]:
        """In Hugging Face's order."""
        made = torch.empty(self.shape)
        for places, rows in self.pieces():
            made[places] = rows
        return made


class _Tensor(NamedTuple):
    shape: tuple[int, ...]  # the inputs first
    type: GGMLQuantizationType
    offset: int  # in the file


class _Directory:
    """Where the tensors lie. `gguf.GGUFReader` knows as well, but takes seconds over the vocabulary's tokens."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        magic, _, tensors, fields = self._read("4sIQQ")
        if magic != b"GGUF":
            raise ValueError("it is not a GGUF file")
        facts = dict(self._field() for _ in range(fields))
        self.architecture = str(facts.get("general.architecture"))
        listed = [self._tensor() for _ in range(tensors)]
        step = int(str(facts.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)))
        start = -(-file.tell() // step) * step
        self.tensors = {name: found._replace(offset=found.offset + start) for name, found in listed}

    def _read(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack("<" + layout, self._file.read(struct.calcsize("<" + layout)))

    def _text(self) -> str:
        return self._file.read(*self._read("Q")).decode()

    def _field(self) -> tuple[str, object]:
        return self._text(), self._value(GGUFValueType(*self._read("I")))

    def _value(self, kind: GGUFValueType) -> object:
        if kind == GGUFValueType.STRING:
            return self._text()
        if kind != GGUFValueType.ARRAY:
            return self._read(_FORMATS[kind.name])[0]
        element, count = self._read("IQ")
        element = GGUFValueType(element)
        if element in (GGUFValueType.STRING, GGUFValueType.ARRAY):
            for _ in range(count):
                self._value(element)
        else:
            self._file.seek(count * struct.calcsize(_FORMATS[element.name]), 1)
        return None

    def _tensor(self) -> tuple[str, _Tensor]:
        name, (rank,) = self._text(), self._read("I")
        shape = self._read(f"{rank}Q")
        kind, offset = self._read("IQ")
        return name, _Tensor(shape, GGMLQuantizationType(kind), offset)
