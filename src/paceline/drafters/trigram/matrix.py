"""The stored n-gram matrix (ADED, "LLM representative"): P(next token | n - 1 tokens), sparse and memory-mapped.

One safetensors file holds a table for each order n, n - 1, ..., 2; the shorter ones serve contexts that the longest
has never seen. A table of order k over a vocabulary of V tokens:

    heads    [V + 1]           contexts that begin with token t are heads[t] .. heads[t + 1]
    keys     [contexts]        the other k - 2 tokens of a context, packed, sorted within a head
    offsets  [contexts + 1]    successors of context c are offsets[c] .. offsets[c + 1], most probable first
    tokens   [successors]      token ids
    codes    [successors]      probabilities, 8 bits each: p = 2 ** (-code / 24)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float, Integer

from paceline.drafting.corpus.mapped import mapped, read_only
from paceline.errors import IntegrityError
from paceline.targets import store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE = "matrix.safetensors"
FORMAT = "paceline-ngrams-1"
ORDERS = (2, 3, 4)
FIELDS = ("heads", "keys", "offsets", "tokens", "codes")

#: A code is worth 3 % of a probability, so rounding moves one by 1.5 %; 255 codes reach down to 1 / 1600.
CODES_PER_HALVING = 24
PROBABILITIES: Float[np.ndarray, " 256"] = np.exp2(-np.arange(256) / CODES_PER_HALVING).astype(np.float32)


class Table(NamedTuple):
    """The arrays of one order, as the module's docstring lays them out."""

    heads: Integer[np.ndarray, " vocab+1"]
    keys: Integer[np.ndarray, " contexts"]
    offsets: Integer[np.ndarray, " contexts+1"]
    tokens: Integer[np.ndarray, " successors"]
    codes: Integer[np.ndarray, " successors"]


class Matrix(NamedTuple):
    """A matrix in memory: read-only views of the file, whose pages all processes share."""

    order: int
    vocab: int
    tables: tuple[Table, ...]  # of order n, n - 1, ..., 2
    facts: dict[str, str]  # the file's metadata


def encode(p: Float[np.ndarray, " successors"]) -> Integer[np.ndarray, " successors"]:
    """Probabilities in (0, 1] as codes; smaller ones than the last code's are rounded up to it."""
    codes: np.ndarray = np.clip(np.rint(-np.log2(p) * CODES_PER_HALVING), 0, 255)
    return codes.astype(np.uint8)


def token_bits(vocab: int) -> int:
    """Bits of a packed token id."""
    return max(int(vocab - 1).bit_length(), 1)


def dtypes(order: int, vocab: int) -> dict[str, np.dtype]:
    """How the arrays of a matrix are stored; the tables of one file agree, so that compiled code sees one type."""
    smallest = next(
        kind for kind in (np.uint16, np.uint32, np.uint64) if (order - 2) * token_bits(vocab) <= 8 * kind(0).nbytes
    )
    token = np.uint16 if vocab <= 1 << 16 else np.uint32
    kinds = (np.uint32, smallest, np.uint32, token, np.uint8)
    return {field: np.dtype(kind) for field, kind in zip(FIELDS, kinds, strict=True)}


def no_matrix(order: int, vocab: int) -> Matrix:
    """A matrix that holds nothing."""
    kinds = dtypes(order, vocab)
    sizes = {"heads": vocab + 1, "offsets": 1}
    table = Table(*(read_only(np.zeros(sizes.get(field, 0), kinds[field])) for field in FIELDS))
    return Matrix(order, vocab, (table,) * (order - 1), {})


def matrix_folder(model: str) -> Path:
    """Where a user's own matrix of a model lies, unless it is said to be elsewhere. `model`: its folder or hub id."""
    return store.root() / "trigram" / store.entry_name(model)


def load_matrix(path: Path, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> Matrix:
    """Map the matrix at `path` (the file, or a folder that holds it).

    Args:
        tokenizer: of the target; must be the one the matrix was built with.
        vocab_size: of the target; every token of the matrix must be below it.

    Raises:
        IntegrityError: there is no such file, or it is damaged or something else.
        TokenizerMismatch: it was built with another tokenizer.
    """
    path = path / FILE if path.is_dir() else path
    with mapped(path, FORMAT, tokenizer, "n-gram matrix", "paceline trigram build") as (facts, array):
        order, vocab = int(facts["order"]), int(facts["vocab"])
        tables = tuple(Table(*(array(f"{k}.{field}") for field in FIELDS)) for k in range(order, 1, -1))
        faults = [_fault(table, dtypes(order, vocab), vocab, vocab_size) for table in tables]
    if any(faults):
        raise IntegrityError(f"{path} is damaged ({next(filter(None, faults))}): build it again")
    return Matrix(order, vocab, tables, facts)


def _fault(table: Table, kinds: dict[str, np.dtype], vocab: int, vocab_size: int) -> str | None:
    """What in the table could make compiled code read outside it, or draft a token that does not exist."""
    if any(array.dtype != kinds[field] or array.ndim != 1 for field, array in table._asdict().items()):
        return "unexpected types"
    if len(table.heads) != vocab + 1 or len(table.tokens) != len(table.codes):
        return "arrays of the wrong length"
    for starts, items in ((table.heads, table.keys), (table.offsets, table.tokens)):
        if len(starts) == 0 or starts[0] != 0 or starts[-1] != len(items) or (starts[1:] < starts[:-1]).any():
            return "an index that does not fit"
    if len(table.offsets) != len(table.keys) + 1:
        return "arrays of the wrong length"
    if len(table.tokens) and table.tokens.max() >= min(vocab, vocab_size):
        return "a token outside the vocabulary"
    return None
