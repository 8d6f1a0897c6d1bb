"""Packed weights as a file: the objects of `paceline.targets` as JSON, the bytes of their tensors after it.

A page of zeros at most parts the two: magic, length and SHA-256 of the JSON, the JSON, then all tensors, each on a
cache line's boundary, in the order of their places. The objects are walked as they are (dataclasses, named tuples,
enums, and classes with `__getstate__`), so that what a target is made of is nowhere listed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
import zlib
from collections.abc import Mapping
from enum import Enum
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from paceline.errors import IntegrityError
from paceline.targets.native.memory import LINE, Arena

MAGIC = b"paceline-packed1"
_HEAD = struct.Struct("<16sQ32s")
_PAGE = 4096
_ROOM = "paceline.targets."  # objects of no other package are made


def write(path: Path, about: Mapping[str, Any], kept: object) -> None:
    """Write the objects, with `about` (plain JSON) for `read_about`.

    Raises:
        TypeError, ValueError: there is something among them that cannot be kept; nothing is written then.
    """
    writer = _Writer()
    listed = writer.encode(kept)
    check = 0
    for tensor in writer.tensors:
        check = zlib.crc32(_bytes(tensor), check)
    header = {"about": about, "bytes": writer.end, "crc32": check, "kept": listed}
    text = json.dumps(header, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(_HEAD.pack(MAGIC, len(text), hashlib.sha256(text).digest()) + text)
        file.write(bytes(-file.tell() % _PAGE))
        for tensor in writer.tensors:
            file.write(_bytes(tensor))
            file.write(bytes(-tensor.nbytes % LINE))


def read_about(file: BinaryIO) -> dict[str, Any]:
    """The header of an open file.

    Raises:
        IntegrityError: it is damaged, or not such a file.
    """
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        raise IntegrityError("it is cut short")
    magic, length, digest = _HEAD.unpack(head)
    text = file.read(length) if magic == MAGIC and length < 1 << 30 else b""
    if hashlib.sha256(text).digest() != digest:
        raise IntegrityError("its header is damaged")
    header: dict[str, Any] = json.loads(text)
    return header


def read(file: BinaryIO, header: Mapping[str, Any]) -> Any:
    """The objects after the header, their tensors in memory of huge pages.

    Raises:
        IntegrityError: bytes are missing, or others than were written.
    """
    file.seek(-file.tell() % _PAGE, 1)
    memory = Arena().take(header["bytes"])
    view, at = _bytes(memory), 0
    while at < len(view) and (count := file.readinto(view[at:])):  # type: ignore[attr-defined]  # a raw file has it
        at += count
    if at < len(view):
        raise IntegrityError("it is cut short")
    found = _Reader(memory)
    kept = found.decode(header["kept"])
    check = 0
    for tensor in found.tensors.values():
        check = zlib.crc32(_bytes(tensor), check)
    if check != header["crc32"]:
        raise IntegrityError("its weights are damaged")
    return kept


def _bytes(tensor: Tensor) -> memoryview:
    array: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


class _Writer:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.end = 0
        self._seen: dict[int, int] = {}
        self._alive: list[object] = []  # ids are theirs as long as they live

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind in (list, tuple):
            return {kind.__name__: [self.encode(one) for one in value]}
        if kind is dict and all(type(key) is str for key in value):
            return {"dict": {key: self.encode(one) for key, one in value.items()}}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if id(value) in self._seen:
            return {"same": self._seen[id(value)]}
        self._seen[id(value)] = len(self._alive)
        self._alive.append(value)
        number = len(self._alive) - 1
        if isinstance(value, Tensor):
            place, self.end = self.end, self.end + -(-value.nbytes // LINE) * LINE
            self.tensors.append(value)
            dtype = str(value.dtype).removeprefix("torch.")
            return {"tensor": number, "place": place, "shape": list(value.shape), "dtype": dtype}
        if not kind.__module__.startswith(_ROOM):
            raise TypeError(f"a {kind.__name__} cannot be kept")
        if isinstance(value, Enum):
            state = value.value
        elif isinstance(value, tuple):
            state = dict(zip(value._fields, value, strict=True))  # type: ignore[attr-defined]  # a named tuple's
        elif dataclasses.is_dataclass(value):
            state = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        else:
            state = value.__getstate__()
        return {"object": number, "class": f"{kind.__module__}:{kind.__name__}", "state": self.encode(state)}


class _Reader:
    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._made: dict[int, Any] = {}
        self.tensors: dict[int, Tensor] = {}

    def decode(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        match next(iter(value)):
            case "list":
                return [self.decode(one) for one in value["list"]]
            case "tuple":
                return tuple(self.decode(one) for one in value["tuple"])
            case "dict":
                return {key: self.decode(one) for key, one in value["dict"].items()}
            case "dtype":
                return getattr(torch, value["dtype"])
            case "device":
                return torch.device(value["device"])
            case "same":
                return self._made[value["same"]]
            case "tensor":
                made = self._tensor(value)
                self._made[value["tensor"]] = self.tensors[value["tensor"]] = made
                return made
        made = _object(value["class"], self.decode(value["state"]))
        self._made[value["object"]] = made
        return made

    def _tensor(self, value: Mapping[str, Any]) -> Tensor:
        dtype: torch.dtype = getattr(torch, value["dtype"])
        end = value["place"] + prod(value["shape"]) * dtype.itemsize
        return self._memory[value["place"] : end].view(dtype).view(value["shape"])


def _object(name: str, state: Any) -> Any:
    module, _, attribute = name.partition(":")
    if not module.startswith(_ROOM):
        raise IntegrityError(f"it has a {name}")
    cls = getattr(import_module(module), attribute)
    if issubclass(cls, Enum):
        return cls(state)
    if issubclass(cls, tuple) or dataclasses.is_dataclass(cls):
        return cls(**state)
    made = cls.__new__(cls)
    if hasattr(cls, "__setstate__"):
        made.__setstate__(state)
    else:
        vars(made).update(state)
    return made
