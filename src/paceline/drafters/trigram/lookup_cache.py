"""The matrix as llama.cpp's static lookup cache (`common/ngram-cache.cpp`): what follows each pair of tokens.

The file is a row of records of little-endian 32-bit integers: the two tokens, two times -1 (there is room for four),
the number n of tokens that may follow, then n times a token and its count.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer

from paceline.drafters.trigram.matrix import PROBABILITIES, Matrix
from paceline.errors import require
from paceline.files import whole

PAIR = 3  # the order whose contexts are two tokens
HEAD = 5  # integers of a record before its tokens
SCALE = 1000  # counts are probabilities, so often: small enough for llama.cpp's products of counts, which are 32-bit


class Written(NamedTuple):
    """What a file has."""

    pairs: int
    trigrams: int


def write_lookup_cache(matrix: Matrix, path: Path) -> Written:
    """Write the trigrams of a matrix to a new file.

    llama.cpp drafts a token of this cache where it has half of the counts of its pair, so what counts is the ratio of
    probabilities, as here. A trigram that the matrix left out as too rare is missing there as well.

    Raises:
        OptionError: the matrix has bigrams only, or the file is there already.
        DiskFull: there was no room.
    """
    require(matrix.order >= PAIR, "llama.cpp's static lookup cache has trigrams, and this matrix has bigrams only")
    require(not path.exists(), f"{path} is there already: name another file")
    records = lookup_records(matrix)
    with whole(path) as partial, partial.open("wb") as file:
        file.write(records.data)  # not tofile, whose errors do not say that the disk is full, if there are any
    table = matrix.tables[matrix.order - PAIR]
    return Written(int((np.diff(table.offsets) > 0).sum()), len(table.tokens))


def lookup_records(matrix: Matrix) -> Integer[np.ndarray, " integers"]:
    """All records, one after another, of those pairs that something follows."""
    table = matrix.tables[matrix.order - PAIR]
    first, counts = np.repeat(np.arange(matrix.vocab), np.diff(table.heads)), np.diff(table.offsets)
    kept = counts > 0
    first, second, counts = first[kept], table.keys[kept], counts[kept]
    starts = HEAD * np.arange(len(counts)) + 2 * (np.cumsum(counts, dtype=np.int64) - counts)
    records = np.full(HEAD * len(counts) + 2 * len(table.tokens), -1, "<i4")
    records[starts], records[starts + 1], records[starts + HEAD - 1] = first, second, counts
    places = HEAD * np.repeat(np.arange(1, len(counts) + 1), counts) + 2 * np.arange(len(table.tokens))
    records[places] = table.tokens
    records[places + 1] = np.maximum(np.rint(SCALE * PROBABILITIES[table.codes]), 1)
    return records
