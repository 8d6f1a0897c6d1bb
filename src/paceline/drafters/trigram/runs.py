"""Counting more n-grams than memory holds: sorted runs on disk, merged in blocks (an external merge sort)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Integer

#: Sorted distinct n-grams and how often each occurred.
Block = tuple[np.ndarray, Integer[np.ndarray, " ngrams"]]


class Packing:
    """n-grams as single numbers that sort in the n-grams' order.

    They are packed into 64 bits where those suffice, else into complex numbers, which numpy sorts by real part and
    then by imaginary part: two exact integers of up to 53 bits.
    """

    def __init__(self, order: int, bits: int) -> None:
        self.order, self.bits = order, bits
        self.wide = order * bits > 64
        self.dtype = np.dtype(np.complex128 if self.wide else np.uint64)

    def pack(self, ids: Integer[np.ndarray, " tokens"]) -> np.ndarray:
        """The n-grams in `ids`; a negative id separates texts, and no n-gram spans it."""
        if len(ids) < self.order:
            return np.empty(0, self.dtype)
        columns = [ids[start : len(ids) - self.order + 1 + start] for start in range(self.order)]
        inside = columns[0] >= 0
        for column in columns[1:]:
            inside &= column >= 0
        return self.join([column[inside] for column in columns])

    def join(self, columns: list[Integer[np.ndarray, " ngrams"]]) -> np.ndarray:
        """The n-grams with these columns, first token first."""
        if not self.wide:
            return _join(columns, self.bits)
        half = self.order // 2
        return _join(columns[:half], self.bits) + 1j * _join(columns[half:], self.bits)

    def unpack(self, records: np.ndarray) -> list[Integer[np.ndarray, " ngrams"]]:
        """The columns of the n-grams, first token first."""
        if not self.wide:
            return _split(records, self.order, self.bits)
        half = self.order // 2
        high, low = records.real.astype(np.uint64), records.imag.astype(np.uint64)
        return _split(high, half, self.bits) + _split(low, self.order - half, self.bits)


def _join(columns: list[np.ndarray], bits: int) -> np.ndarray:
    packed = columns[0].astype(np.uint64)
    for column in columns[1:]:
        packed <<= np.uint64(bits)
        packed |= column.astype(np.uint64)
    return packed


def _split(packed: np.ndarray, count: int, bits: int) -> list[np.ndarray]:
    mask = np.uint64((1 << bits) - 1)
    return [(packed >> np.uint64(bits * place) & mask).astype(np.int64) for place in range(count - 1, -1, -1)]


class Runs:
    """Counts of n-grams, spilled to `folder` as sorted runs."""

    def __init__(self, folder: Path, packing: Packing) -> None:
        self.folder, self.packing = folder, packing
        self.total = 0  # n-grams counted
        self._sizes: list[int] = []

    def spill(self, ids: Integer[np.ndarray, " tokens"]) -> None:
        """Count the n-grams of `ids` (see `Packing.pack`) as one more run."""
        self._write(*np.unique(self.packing.pack(ids), return_counts=True))

    def spill_counted(self, ngrams: Integer[np.ndarray, "ngrams n"], counts: Integer[np.ndarray, " ngrams"]) -> None:
        """Count n-grams so often each as one more run; longer ones by their last tokens, and none with negative ids."""
        columns = list(ngrams.T[-self.packing.order :])
        whole = columns[0] >= 0  # what is missing is missing at the beginning
        packed, places = np.unique(self.packing.join([column[whole] for column in columns]), return_inverse=True)
        self._write(packed, np.bincount(places, counts[whole], len(packed)))

    def _write(self, records: np.ndarray, counts: np.ndarray) -> None:
        self.total += int(counts.sum())
        for kind, array in (("ngrams", records), ("counts", counts.astype(np.uint32))):
            with self._path(kind, len(self._sizes)).open("wb") as file:
                file.write(array.data)  # not tofile, whose errors do not say that the disk is full
        self._sizes.append(len(records))

    def merged(self, block: int) -> Iterator[Block]:
        """All n-grams with their total counts, ascending, about `block` in memory at a time."""
        share = max(block // max(len(self._sizes), 1), 1)
        at = [0] * len(self._sizes)
        while any(start < size for start, size in zip(at, self._sizes, strict=True)):
            parts = [self._read(run, start, share) for run, start in enumerate(at)]
            # Whatever a run has left to read is greater than what was read of it: up to the least of those bounds,
            # everything is here. The run that sets the bound is used up, so each turn gets on by a share.
            more = [p[0][-1:] for p, start, size in zip(parts, at, self._sizes, strict=True) if start + share < size]
            bound = np.sort(np.concatenate(more))[0] if more else None
            ends = [len(p[0]) if bound is None else int(np.searchsorted(p[0], bound, "right")) for p in parts]
            at = [start + end for start, end in zip(at, ends, strict=True)]
            yield _total(
                np.concatenate([records[:end] for (records, _), end in zip(parts, ends, strict=True)]),
                np.concatenate([counts[:end] for (_, counts), end in zip(parts, ends, strict=True)]),
            )

    def _read(self, run: int, start: int, count: int) -> Block:
        dtype = self.packing.dtype
        return (
            np.fromfile(self._path("ngrams", run), dtype, count, offset=start * dtype.itemsize),
            np.fromfile(self._path("counts", run), np.uint32, count, offset=start * 4),
        )

    def _path(self, kind: str, run: int) -> Path:
        return self.folder / f"{self.packing.order}.{run}.{kind}"


def _total(records: np.ndarray, counts: np.ndarray) -> Block:
    order = np.argsort(records, kind="stable")
    records, counts = records[order], counts[order].astype(np.int64)
    starts = np.flatnonzero(np.concatenate([[True], records[1:] != records[:-1]]))
    return records[starts], np.add.reduceat(counts, starts)
