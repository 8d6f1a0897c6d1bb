"""Memory for packed weights, and the return of what they replace."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor


def allocate(size: int) -> UInt8[Tensor, " size"]:
    """Memory from the system, in huge pages where it has them: fewer addresses to translate while weights stream."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class MappedFiles:
    """The files mapped into memory, such as the checkpoint that safetensors gives views of.

    A view keeps the whole file mapped, so that the pages of weights nobody needs any more would stay in memory.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        with contextlib.suppress(OSError):  # Linux only; elsewhere nothing is released early
            for line in Path("/proc/self/maps").read_text().splitlines():
                addresses, access, _, _, inode, *_ = line.split()
                if access.endswith("p") and inode != "0":
                    start, end = (int(address, 16) for address in addresses.split("-"))
                    self._ranges.append((start, end))

    def release(self, tensor: Tensor) -> None:
        """Drop the tensor's pages from this process if they are a file's; should somebody read them, they return."""
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if any(low <= start and end <= high for low, high in self._ranges):
            first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last:
                ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
