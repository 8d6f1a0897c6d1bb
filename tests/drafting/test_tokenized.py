"""Samples of the model itself as a corpus; how texts are read is tested with what is built from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from paceline.drafting.corpus.tokenized import BUILDING, Corpus, workplace
from paceline.errors import CorpusError, TokenizerMismatch
from paceline.targets.tokenizers import fingerprint
from paceline.training.data.samples import Manifest, Sample, shard_name, write_shard


def folder_of(path: Path, tokenizer: PreTrainedTokenizerFast, shards: list[list[Sample]]) -> Path:
    manifest = Manifest(path)
    manifest.open({"tokenizer": fingerprint(tokenizer)})
    for number, samples in enumerate(shards):
        write_shard(path, number, samples, 2, {"samples": len(samples)})
        manifest.add(shard_name(number), {"samples": len(samples)})
    return path


def read(paths: list[Path], tokenizer: PreTrainedTokenizerFast) -> tuple[list[list[int]], Corpus]:
    corpus = Corpus(tokenizer, paths, lambda text, total: lambda done: None, "")
    return [text.ids.tolist() for text in corpus], corpus


def test_a_killed_build_is_swept_away(tmp_path: Path) -> None:
    """By the next one in the same folder, which leaves alone one that still runs."""
    left = tmp_path / f"{BUILDING}killed"
    left.mkdir()
    (left / "run-0").write_bytes(b"half")
    with workplace(tmp_path, []) as running:
        assert not left.exists()
        with workplace(tmp_path, ["made"]) as other:
            (other / "made").touch()
        assert running.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_what_the_model_wrote(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """With the three tokens before it, which n-grams look back on."""
    turns = Sample([*range(20)], [0] * 5 + [1] * 4 + [0] * 6 + [1] * 5)
    shards = [[turns, Sample([30, 31, 32], [0, 1, 1])], [Sample([40, 41], [1, 1])]]
    found, corpus = read([folder_of(tmp_path / "d", tiny_tokenizer, shards)], tiny_tokenizer)
    assert found == [[*range(2, 9)], [*range(12, 20)], [30, 31, 32], [40, 41]]
    [source] = corpus.sources
    assert (source.name, source.texts, source.tokens) == ("d", 4, 20)
    assert source.bytes == sum(path.stat().st_size for path in (tmp_path / "d").glob("*.safetensors"))


def test_what_it_could_have_said(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    told = {4: ([5, 9], [np.log(0.75), np.log(0.25)]), 5: ([6, 7], [0.0, -9.0])}
    short = Sample([7, 8], [0, 1], {1: ([8, 9], [0.0, -9.0])})
    samples = [Sample([1, 2, 3, 4, 5, 6], [0] * 4 + [1] * 2, told), short]
    folder = folder_of(tmp_path / "d", tiny_tokenizer, [samples, [Sample([30, 31], [0, 1])]])
    first, second, third = Corpus(tiny_tokenizer, [folder], lambda text, total: lambda done: None, "")
    assert first.said.tolist() == [[2, 3, 4, 5], [2, 3, 4, 9], [3, 4, 5, 6], [3, 4, 5, 7]]
    assert first.p == pytest.approx([0.75, 0.25, 1, np.exp(-9)], rel=1e-2)
    assert second.said.tolist() == [[-1, -1, 7, 8], [-1, -1, 7, 9]]
    assert third.said is None  # open text, which nobody asked the model about


def test_with_text(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abc")
    folder = folder_of(tmp_path / "d", tiny_tokenizer, [[Sample([1, 2], [0, 1])]])
    assert read([tmp_path / "text.txt", folder], tiny_tokenizer)[0] == [tiny_tokenizer.encode("abc"), [1, 2]]


def test_bad_folders(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    def refused(error: type[Exception], message: str, folder: Path) -> None:
        with pytest.raises(error, match=message):
            read([folder], tiny_tokenizer)

    (tmp_path / "empty").mkdir()
    refused(CorpusError, "is not a folder that", tmp_path / "empty")
    refused(CorpusError, "has no samples", folder_of(tmp_path / "none", tiny_tokenizer, []))
    damaged = folder_of(tmp_path / "damaged", tiny_tokenizer, [[Sample([1], [1])]])
    (damaged / shard_name(0)).write_bytes(b"nonsense")
    refused(CorpusError, "is not a shard", damaged)
    unknown = folder_of(tmp_path / "unknown", tiny_tokenizer, [[Sample([1, 300], [1, 1])]])
    refused(CorpusError, "does not know", unknown)
    other = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.backend_tokenizer)
    other.add_tokens(["<new>"])
    refused(TokenizerMismatch, "another tokenizer", folder_of(tmp_path / "other", other, [[Sample([1], [1])]]))


def test_dtype(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "d", tiny_tokenizer, [[Sample([1, 2], [1, 1])]])
    corpus = Corpus(tiny_tokenizer, [folder], lambda text, total: lambda done: None, "")
    assert {text.ids.dtype for text in corpus} == {np.dtype(np.int32)}
