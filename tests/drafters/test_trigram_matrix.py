"""Reading a matrix: mapped, checked, refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedTokenizerFast

from paceline.drafters.trigram.build import build
from paceline.drafters.trigram.drafter import SHIPPED
from paceline.drafters.trigram.matrix import (
    FIELDS,
    FILE,
    FORMAT,
    PROBABILITIES,
    dtypes,
    encode,
    load_matrix,
    matrix_folder,
    no_matrix,
)
from paceline.drafters.trigram.mixture import successors
from paceline.drafters.trigram.structures import WIDTH, Ngrams, Rule, empty_counts
from paceline.drafting.corpus.tokenized import tokenizer_of
from paceline.errors import IntegrityError, TokenizerMismatch
from paceline.targets.tokenizers import fingerprint
from tiny import byte_tokenizer


@pytest.fixture
def folder(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    (tmp_path / "corpus.txt").write_text("the cat sat on the mat, the cat ran\n" * 3)
    build(tiny_tokenizer, [tmp_path / "corpus.txt"], tmp_path / "out", model="tiny", threshold=1)
    return tmp_path / "out"


def test_mapped_and_read_only(folder: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    for path in (folder, folder / FILE):
        matrix = load_matrix(path, tiny_tokenizer, 257)
        assert (matrix.order, matrix.vocab, len(matrix.tables)) == (3, 257, 2)
        assert matrix.facts["model"] == "tiny"
        for table in matrix.tables:
            for field, array in table._asdict().items():
                assert array.dtype == dtypes(3, 257)[field]
                assert not array.flags.writeable
                assert not array.flags.owndata


def test_other_tokenizer(folder: Path) -> None:
    other = byte_tokenizer()
    other.add_tokens(["<new>"])
    for tokenizer in (other, None):
        with pytest.raises(TokenizerMismatch, match=r"another tokenizer .*tiny.*trigram build"):
            load_matrix(folder, tokenizer, 258)


def test_fingerprint_is_of_the_tokenizer_alone() -> None:
    first, second = byte_tokenizer(), byte_tokenizer(chat=False)
    first.model_max_length = 5
    assert fingerprint(first) == fingerprint(second)
    second.add_tokens(["<new>"])
    assert fingerprint(first) != fingerprint(second)


def test_model_with_a_smaller_vocabulary(folder: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(IntegrityError, match="outside the vocabulary"):
        load_matrix(folder, tiny_tokenizer, 60)


def test_missing(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(IntegrityError, match="cannot read the n-gram matrix"):
            load_matrix(path, tiny_tokenizer, 257)


@pytest.mark.parametrize("content", [b"", b"no safetensors at all", "cut"])
def test_damaged_file(content: bytes | str, folder: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    whole = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(whole[:-10] if isinstance(content, str) else content)
    with pytest.raises(IntegrityError, match="cannot read the n-gram matrix"):
        load_matrix(folder, tiny_tokenizer, 257)


def test_something_else(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    save_file({"weight": np.zeros(3, np.float32)}, tmp_path / FILE)
    with pytest.raises(IntegrityError, match="is no n-gram matrix"):
        load_matrix(tmp_path, tiny_tokenizer, 257)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("3.heads", lambda a: a[:-1]),
        ("3.heads", lambda a: a[::-1].copy()),
        ("2.heads", lambda a: a + 1),
        ("3.offsets", lambda a: a * 2),
        ("3.offsets", lambda a: np.append(a, a[-1])),
        ("2.offsets", lambda a: a[:0]),
        ("2.tokens", lambda a: a + 300),
        ("2.tokens", lambda a: a.astype(np.uint32)),
        ("3.codes", lambda a: a[:-1]),
        ("3.keys", lambda a: a[:-1]),
        ("3.keys", lambda a: a.reshape(1, -1)),
    ],
)
def test_damaged_arrays(name: str, change, folder: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:  # type: ignore[no-untyped-def]
    """Nothing that compiled code would follow out of the arrays is let in."""
    arrays = load_file(folder / FILE)
    arrays[name] = np.ascontiguousarray(change(arrays[name]))
    facts = {"format": FORMAT, "order": "3", "vocab": "257", "tokenizer": fingerprint(tiny_tokenizer)}
    save_file(arrays, folder / FILE, facts)
    with pytest.raises(IntegrityError, match="is damaged"):
        load_matrix(folder, tiny_tokenizer, 257)


def test_codes() -> None:
    p = np.geomspace(1 / 1500, 1, 400)
    assert PROBABILITIES[encode(p)] == pytest.approx(p, rel=0.015)
    assert encode(np.array([1e-9])) == 255


def test_no_matrix_has_the_types_of_one(folder: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """So that numba compiles once for both."""
    for table, none in zip(load_matrix(folder, tiny_tokenizer, 257).tables, no_matrix(3, 257).tables, strict=True):
        for field in FIELDS:
            ours, theirs = getattr(table, field), getattr(none, field)
            assert (ours.dtype, ours.ndim, ours.flags.writeable) == (theirs.dtype, theirs.ndim, theirs.flags.writeable)


def test_matrix_folder(cache_dir: Path, tmp_path: Path) -> None:
    assert matrix_folder("Org/Some-Model_1.5") == cache_dir / "trigram" / "Org--Some-Model_1.5"
    own, other = (matrix_folder(str(tmp_path / run / "my model")) for run in "ab")
    assert own.parent == cache_dir / "trigram"
    assert own.name.endswith("--a--my--model")
    assert own != other
    assert matrix_folder(str(cache_dir / "models" / "named-1")) == cache_dir / "trigram" / "named-1"


@pytest.mark.model
def test_the_default_models_comes_along() -> None:
    tokenizer, _ = tokenizer_of("smollm2-135m")
    [path] = SHIPPED.glob("smollm2-135m/*.safetensors")
    assert path.stat().st_size < 16_000_000
    matrix = load_matrix(path, tokenizer, 49_152)
    told = json.loads((path.parent / "provenance.json").read_text())
    assert matrix.order == told["order"]
    assert told["bytes"] == path.stat().st_size
    assert not [source["name"] for source in told["corpus"] if "eval" in source["name"]]
    ngrams = Ngrams(matrix.tables, empty_counts(1), empty_counts(1), Rule(matrix.order, 16, False, 0.1, 1.0, 1.0))
    tokens, probs = np.zeros(WIDTH, np.int64), np.zeros(WIDTH)
    size = successors(ngrams, np.array(tokenizer.encode(" there is a lot")[-3:]), tokens, probs)
    assert tokenizer.decode([int(tokens[probs[:size].argmax()])]) == " of"
