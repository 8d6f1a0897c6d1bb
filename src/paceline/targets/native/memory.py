"""Memory for packed weights, and the return of what they replace."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

CHUNK = 64 << 20  # bytes
LINE = 64  # of a cache


class Arena:
    """Memory from the system in huge pages, handed out piece by piece.

    Streaming weights through pages of 4 KiB costs a third of the bandwidth: too many addresses to translate.
    """

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> UInt8[Tensor, " size"]:
        """Zeros, on a cache line's boundary; free when neither this piece nor its neighbours are used any more. Another
        line follows, since the kernels read up to three bytes past a matrix (digits.h).
        """
        rounded = -(-size // LINE) * LINE
        if rounded + LINE > len(self._left):
            memory = mmap.mmap(-1, max(rounded + LINE, CHUNK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(AttributeError, OSError):  # not on every system
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._left = torch.frombuffer(memory, dtype=torch.uint8)
        piece, self._left = self._left[:size], self._left[rounded:]
        return piece


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
