"""The trigrams of a matrix in llama.cpp's form, read back by its rules."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from paceline.drafters.trigram.build import build
from paceline.drafters.trigram.lookup_cache import SCALE, write_lookup_cache
from paceline.drafters.trigram.matrix import Matrix, load_matrix, no_matrix
from paceline.errors import DiskFull, OptionError
from paceline.files import whole

TEXT = "the cat sat on the mat, the cat ran\n" * 3


def read(path: Path) -> dict[tuple[int, ...], dict[int, int]]:
    """As llama.cpp's `common_ngram_cache_load`: nothing may be left over, and every n and count is above 0."""
    data, at, found = path.read_bytes(), 0, {}
    while at < len(data):
        *ngram, count = struct.unpack_from("<5i", data, at)
        assert count > 0
        pairs = struct.unpack_from(f"<{2 * count}i", data, at + 20)
        at += 20 + 8 * count
        assert tuple(ngram) not in found
        found[tuple(ngram)] = dict(zip(pairs[::2], pairs[1::2], strict=True))
        assert min(pairs[1::2]) > 0
    return found


def matrix_of(tokenizer: PreTrainedTokenizerFast, folder: Path, order: int) -> Matrix:
    (folder / "corpus.txt").write_text(TEXT)
    build(tokenizer, [folder / "corpus.txt"], folder / "out", model="tiny", threshold=1, order=order)
    return load_matrix(folder / "out", tokenizer, 257)


@pytest.mark.parametrize("order", [3, 4])
def test_what_follows_each_pair(order: int, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    written = write_lookup_cache(matrix_of(tiny_tokenizer, tmp_path, order), tmp_path / "static.bin")
    found = read(tmp_path / "static.bin")
    ids = tiny_tokenizer(TEXT, add_special_tokens=False).input_ids
    follows: dict[tuple[int, ...], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for first, second, third in zip(ids, ids[1:], ids[2:], strict=False):
        follows[first, second, -1, -1][third] += 1
    for pair, tokens in follows.items():
        assert tokens.keys() <= found[pair].keys()
        assert max(found[pair], key=found[pair].__getitem__) in (
            t for t, n in tokens.items() if n == max(tokens.values())
        )
        for token, count in tokens.items():  # probabilities are smoothed, and rounded by 1.5 %
            assert found[pair][token] == pytest.approx(SCALE * count / sum(tokens.values()), rel=0.5, abs=1)
    assert written.pairs == len(found)
    assert written.trigrams == sum(map(len, found.values()))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file whose disk is always full is Linux's")
def test_a_full_disk(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little is written: numpy's tofile loses its last block without a word."""

    @contextmanager
    def full(path: Path) -> Iterator[Path]:
        with whole(path):
            yield Path("/dev/full")

    matrix = matrix_of(tiny_tokenizer, tmp_path, order=3)
    monkeypatch.setattr("paceline.drafters.trigram.lookup_cache.whole", full)
    with pytest.raises(DiskFull):
        write_lookup_cache(matrix, tmp_path / "static.bin")
    assert not (tmp_path / "static.bin").exists()


def test_refused(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="bigrams only"):
        write_lookup_cache(no_matrix(2, 257), tmp_path / "static.bin")
    (tmp_path / "static.bin").write_text("mine")
    with pytest.raises(OptionError, match="is there already"):
        write_lookup_cache(no_matrix(3, 257), tmp_path / "static.bin")
    assert (tmp_path / "static.bin").read_text() == "mine"


def test_a_matrix_of_nothing(tmp_path: Path) -> None:
    assert write_lookup_cache(no_matrix(3, 257), tmp_path / "static.bin") == (0, 0)
    assert (tmp_path / "static.bin").read_bytes() == b""
