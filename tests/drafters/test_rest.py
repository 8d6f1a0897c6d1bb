"""REST: the datastore against a sort of all suffixes, and what is drafted against a search of the whole corpus."""

from __future__ import annotations

import errno
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import paceline
from paceline.drafters.rest import datastore as module
from paceline.drafters.rest.datastore import FILE, Datastore, build, load_datastore
from paceline.drafters.rest.drafter import Rest
from paceline.drafters.rest.search import lookup
from paceline.errors import CorpusError, DiskFull, IntegrityError, OptionError, TokenizerMismatch
from paceline.policies.fixed import Fixed
from tiny import byte_tokenizer

BETWEEN = 4  # of the datastores below, whose tokens are 0 .. 3
TARGET = SimpleNamespace(device=torch.device("cpu"), vocab_size=BETWEEN, tokenizer=None, name="none")

texts = st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=5).filter(any)


def datastore_of(parts: list[list[int]]) -> Datastore:
    tokens = [token for part in parts if part for token in (*part, BETWEEN)]
    suffixes = sorted(range(len(tokens)), key=lambda start: tokens[start:])
    return Datastore(np.array(tokens, np.uint16), np.array(suffixes, np.uint32), BETWEEN)


def continuations(parts: list[list[int]], context: list[int], shortest: int) -> list[list[int]]:
    """What followed the longest suffix of the context that occurs."""
    for n in range(len(context), shortest - 1, -1):
        found = [
            part[at + n :] for part in parts for at in range(len(part) - n + 1) if part[at : at + n] == context[-n:]
        ]
        if found:
            return found
    return []


@given(texts, st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(1, 3), st.integers(1, 4))
def test_lookup_is_a_search(parts: list[list[int]], context: list[int], shortest: int, depth: int) -> None:
    trie = lookup(datastore_of(parts), np.array(context), shortest, depth)
    counts: Counter[tuple[int, ...]] = Counter()
    for tokens in continuations(parts, context, shortest):
        counts.update(tuple(tokens[: n + 1]) for n in range(min(depth, len(tokens))))
    paths = {0: ()}
    for node in range(1, len(trie.tokens)):
        paths[node] = (*paths[int(trie.parents[node])], int(trie.tokens[node]))
    assert {path: int(trie.counts[node]) for node, path in paths.items() if path} == counts
    for node, path in paths.items():
        if path:
            siblings = [other for other in counts if other[:-1] == path[:-1]]
            total = counts[path[:-1]] or len(continuations(parts, context, shortest))
            expected = trie.scores[trie.parents[node]] * counts[path] / (total + len(siblings))
            assert trie.scores[node] == pytest.approx(expected)


def row(ids: list[int], room: int = 9, k: int = 4) -> SimpleNamespace:
    return SimpleNamespace(ids=ids, room=room, policy=Fixed(k=k), state=None, slot=0, sampling=False, plain=True)


def draft(parts: list[list[int]], ids: list[int], **options: int) -> list[tuple[int, ...]]:
    drafter = Rest(TARGET, datastore=datastore_of(parts), **{"budget": 64, **options})
    made = row(ids)
    drafter.begin(made, {})
    [tree] = drafter.draft([made])
    assert set(tree.sources[1:]) <= {"rest"}
    return [tuple(tree.tokens[n] for n in tree.path(node)[1:]) for node in range(1, len(tree))]


def test_drafts_the_likeliest_first() -> None:
    parts = [[1, 2, 3, 0], [1, 2, 3, 1], [1, 2, 0]]
    assert draft(parts, [0, 1, 2]) == [(3,), (0,), (3, 0), (3, 1)]
    assert draft(parts, [0, 1, 2], budget=2) == [(3,), (0,)]
    assert draft(parts, [3, 2], shortest=2) == []
    assert draft(parts, [3, 2], shortest=1)[0] == (3,)
    assert draft(parts, [3, 3, 3]) == []


def test_long_spans_only_as_long_as_wanted() -> None:
    parts = [[0, 1, 2, 3], [3, 1, 2, 0], [3, 1, 2, 0]]
    assert draft(parts, [0, 1, 2]) == [(3,)]
    assert draft(parts, [0, 1, 2], longest=2) == [(0,), (3,)]


def test_more_continuations_than_are_read() -> None:
    parts = [[1, 2, 3]] * 900 + [[1, 2, 0]] * 300
    trie = lookup(datastore_of(parts), np.array([1, 2]), 2, 1)
    assert trie.counts[0] == 512
    assert sorted(trie.counts[1:]) == pytest.approx([128, 384], abs=1)


@pytest.mark.parametrize("bad", [{"shortest": 0}, {"shortest": 5, "longest": 4}, {"budget": 0}])
def test_bad_options(bad: dict[str, int]) -> None:
    with pytest.raises(OptionError, match=r"rest|budget"):
        Rest(TARGET, datastore=datastore_of([[1, 2]]), **bad)


# -- building ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("abcab", "cabba", "a")))
    return path


def test_build(corpus: Path, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    built = build(tiny_tokenizer, [corpus], tmp_path / "out", model="tiny")
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1  # all processes share it
    assert built.tokens == 11
    found = load_datastore(tmp_path / "out", tiny_tokenizer, 257)
    assert found.vocab == 257
    whole = found.tokens.tolist()
    assert whole == [token for text in ("abcab", "cabba", "a") for token in (*tiny_tokenizer.encode(text), 257)]
    assert found.suffixes.tolist() == sorted(range(len(whole)), key=lambda start: whole[start:])
    told = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert told["corpus"][0]["texts"] == 3
    assert told["model"] == "tiny"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [FILE, "provenance.json"]


def test_use(corpus: Path, tiny_llama: LlamaForCausalLM, tmp_path: Path) -> None:
    build(byte_tokenizer(), [corpus], tmp_path / "out")
    llm = paceline.load(tiny_llama, tokenizer=byte_tokenizer(), drafter=f"rest:datastore={tmp_path / 'out'}:budget=8")
    plain = llm.method("none")
    for prompt in ("xab", "abc"):
        options = {"max_new_tokens": 9, "eos": (), "chat": False}
        output = llm.generate(prompt, **options)
        assert output.tokens == plain.generate(prompt, **options).tokens
        assert output.stats.drafted > 0


def test_none_yet(tiny_llama: LlamaForCausalLM, cache_dir: Path) -> None:
    with pytest.raises(OptionError, match="paceline rest build"):
        paceline.load(tiny_llama, tokenizer=byte_tokenizer(), drafter="rest")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read"), (b"", "empty"), (b"\xff\xfe", "UTF-8"), (b"a\0b", "binary")],
    ids=["missing", "empty", "not UTF-8", "binary"],
)
def test_bad_corpus(
    content: bytes | None, message: str, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "c.txt").write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        build(tiny_tokenizer, [tmp_path / "c.txt"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_full_disk(
    corpus: Path, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(DiskFull, match="is full"):
        build(tiny_tokenizer, [corpus], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_of_another_tokenizer(corpus: Path, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    build(tiny_tokenizer, [corpus], tmp_path / "out")
    other = byte_tokenizer()
    other.add_tokens(["<new>"])
    with pytest.raises(TokenizerMismatch, match="another tokenizer"):
        load_datastore(tmp_path / "out", other, 258)


def test_a_tokenizer_with_more_ids_than_the_model(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """What stands between texts is then above all the model's ids; it is never drafted."""
    facts = {"format": module.FORMAT, "vocab": "257", "tokenizer": module.fingerprint(tiny_tokenizer)}
    arrays = {"tokens": np.array([5, 6, 257], np.uint16), "suffixes": np.array([0, 1, 2], np.uint32)}
    save_file(arrays, tmp_path / FILE, facts)
    assert load_datastore(tmp_path, tiny_tokenizer, 256).vocab == 257
    with pytest.raises(IntegrityError, match="damaged"):
        load_datastore(tmp_path, tiny_tokenizer, 6)


def test_damaged(corpus: Path, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    build(tiny_tokenizer, [corpus], tmp_path / "out")
    path = tmp_path / "out" / FILE
    facts = {"format": module.FORMAT, "vocab": "257", "tokenizer": module.fingerprint(tiny_tokenizer)}
    good = load_file(path)
    for wrong in (
        {"suffixes": good["suffixes"][:-1].copy()},
        {"suffixes": good["suffixes"] + np.uint32(len(good["suffixes"]))},
        {"tokens": good["tokens"] + np.uint16(300)},
        {"tokens": good["tokens"].astype(np.int64)},
    ):
        save_file({**good, **wrong}, path, facts)
        with pytest.raises(IntegrityError, match="damaged"):
            load_datastore(path, tiny_tokenizer, 257)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(IntegrityError, match="cannot read"):
        load_datastore(path, tiny_tokenizer, 257)
    with pytest.raises(IntegrityError, match="cannot read"):
        load_datastore(tmp_path / "nowhere", tiny_tokenizer, 257)
