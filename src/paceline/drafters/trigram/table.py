"""Writing a matrix: merged n-gram counts become the arrays of its tables, and those one safetensors file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from paceline.drafters.trigram.matrix import FIELDS, encode
from paceline.drafters.trigram.runs import Block, Packing
from paceline.errors import OptionError

SUCCESSORS = 32  # most that a context keeps, the likeliest: more than a tree ever has room for


class TableWriter:
    """Turns the ascending n-gram counts of one order into a table, block by block, array by array on disk.

    Args:
        folder: where the arrays are gathered.
        kinds: how they are stored, see `matrix.dtypes`.
        threshold, discount: see `build`.
    """

    def __init__(
        self,
        folder: Path,
        packing: Packing,
        vocab: int,
        kinds: Mapping[str, np.dtype],
        threshold: int,
        discount: float,
    ) -> None:
        self.order, self.ngrams = packing.order, 0
        self.paths = {field: folder / f"{self.order}.{field}" for field in FIELDS}
        self._packing, self._vocab, self._kinds = packing, vocab, kinds
        self._threshold, self._discount = threshold, discount
        self._files = {field: path.open("wb") for field, path in self.paths.items()}
        self._heads = np.zeros(vocab + 1, np.int64)
        self._held: Block | None = None
        self._put("offsets", np.zeros(1, np.int64))

    def add(self, block: Block) -> None:
        """Take the next block; its last context waits, for the next block may go on with it."""
        records, counts = block if self._held is None else map(np.concatenate, zip(self._held, block, strict=True))
        *contexts, _ = self._packing.unpack(records)
        last = int(np.flatnonzero(_starts(contexts))[-1])
        self._write(records[:last], counts[:last])
        self._held = records[last:], counts[last:]

    def finish(self) -> None:
        if self._held is not None:
            self._write(*self._held)
        self._put("heads", self._heads.cumsum())
        for file in self._files.values():
            file.close()

    def _write(self, records: np.ndarray, counts: Integer[np.ndarray, " ngrams"]) -> None:
        if len(records) == 0:
            return
        *contexts, tokens = self._packing.unpack(records)
        starts = _starts(contexts)
        group = np.cumsum(starts) - 1
        totals = np.add.reduceat(counts, np.flatnonzero(starts))
        chosen = np.flatnonzero(counts >= self._threshold)
        chosen = chosen[np.lexsort((tokens[chosen], -counts[chosen], group[chosen]))]
        chosen = chosen[_rank(group[chosen]) < SUCCESSORS]
        if len(chosen) == 0:
            return
        group, counts = group[chosen], counts[chosen]
        first = np.flatnonzero(np.diff(group, prepend=-1))  # of each context that kept a successor
        lengths = np.diff(first, append=len(group))
        contexts = [column[chosen[first]] for column in contexts]
        key = np.zeros(len(first), np.uint64)
        for column in contexts[1:]:
            key = key << np.uint64(self._packing.bits) | column.astype(np.uint64)
        self._put("keys", key)
        self._put("offsets", self.ngrams + lengths.cumsum())
        self._put("tokens", tokens[chosen])
        self._put("codes", encode((counts - self._discount) / totals[group]))
        self._heads[1:] += np.bincount(contexts[0], minlength=self._vocab)
        self.ngrams += len(chosen)
        if self.ngrams > np.iinfo(self._kinds["offsets"]).max:
            raise OptionError("trigram build: the matrix would hold more than 4 billion n-grams: raise the threshold")

    def _put(self, field: str, array: np.ndarray) -> None:
        self._files[field].write(array.astype(self._kinds[field]).data)


def _starts(contexts: Sequence[np.ndarray]) -> np.ndarray:
    """Which n-grams are the first of their context."""
    starts = np.zeros(len(contexts[0]), bool)
    starts[:1] = True
    for column in contexts:
        starts[1:] |= column[1:] != column[:-1]
    return starts


def _rank(group: Integer[np.ndarray, " ngrams"]) -> Integer[np.ndarray, " ngrams"]:
    """Position of each n-gram within its context."""
    first = np.flatnonzero(np.diff(group, prepend=-1))
    return np.arange(len(group)) - np.repeat(first, np.diff(first, append=len(group)))


def assemble(tables: Sequence[TableWriter], kinds: Mapping[str, np.dtype], facts: dict[str, str], path: Path) -> None:
    """Write the finished tables as one safetensors file: by hand, for the library would hold all of it in memory."""
    # Larger items first, so that every array is aligned.
    arrays = [(field, table) for field in sorted(FIELDS, key=lambda f: -kinds[f].itemsize) for table in tables]
    header: dict[str, object] = {"__metadata__": facts}
    end = 0
    for field, table in arrays:
        start, end = end, end + table.paths[field].stat().st_size
        kind = kinds[field]
        header[f"{table.order}.{field}"] = {
            "dtype": f"U{8 * kind.itemsize}",
            "shape": [(end - start) // kind.itemsize],
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for field, table in arrays:
            with table.paths[field].open("rb") as file:
                shutil.copyfileobj(file, out, 1 << 20)
