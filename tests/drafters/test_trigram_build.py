"""Building a matrix: counts against a brute-force Counter, the external merge, corpora of all kinds, failures."""

from __future__ import annotations

import errno
import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from paceline.drafters.trigram import build as module
from paceline.drafters.trigram.build import automatic, build
from paceline.drafters.trigram.matrix import PROBABILITIES, Matrix, load_matrix
from paceline.drafters.trigram.runs import Packing, Runs
from paceline.drafters.trigram.table import SUCCESSORS
from paceline.errors import CorpusError, DiskFull, ModelError, OptionError
from paceline.targets.tokenizers import fingerprint
from paceline.training.data.samples import Manifest, Sample, write_shard

Ngrams = dict[tuple[int, ...], dict[int, float]]  # context -> successor -> probability


def counted(texts: Sequence[Sequence[int]], order: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(ids[i : i + order]) for ids in texts for i in range(len(ids) - order + 1))


def expected(counts: Counter[tuple[int, ...]], threshold: int, discount: float) -> Ngrams:
    totals, kept = Counter[tuple[int, ...]](), defaultdict[tuple[int, ...], dict[int, float]](dict)
    for ngram, count in counts.items():
        totals[ngram[:-1]] += count
    for ngram, count in counts.items():
        if count >= threshold:
            kept[ngram[:-1]][ngram[-1]] = (count - discount) / totals[ngram[:-1]]
    return kept


def stored(matrix: Matrix, order: int, bits: int = 9) -> Ngrams:
    """A table read back without the compiled code."""
    table, found = matrix.tables[matrix.order - order], {}
    for head in range(matrix.vocab):
        for context in range(int(table.heads[head]), int(table.heads[head + 1])):
            key = int(table.keys[context])
            rest = tuple(key >> bits * place & (1 << bits) - 1 for place in range(order - 3, -1, -1))
            start, stop = int(table.offsets[context]), int(table.offsets[context + 1])
            codes = table.codes[start:stop]
            assert (np.diff(codes.astype(int)) >= 0).all(), "successors are not sorted by probability"
            found[(head, *rest)] = dict(zip(table.tokens[start:stop].tolist(), PROBABILITIES[codes], strict=True))
    return found


def same(found: Ngrams, wanted: Ngrams) -> None:
    assert found.keys() == wanted.keys()
    for context, successors in wanted.items():
        assert found[context] == pytest.approx(successors, rel=0.015)


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@given(
    texts=st.lists(st.text("abc ", max_size=30).filter(str.strip), min_size=1, max_size=8),
    order=st.integers(2, 4),
    threshold=st.integers(1, 4),
    discount=st.sampled_from([0.0, 0.5, 0.75]),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_against_counter(
    texts: list[str],
    order: int,
    threshold: int,
    discount: float,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> None:
    corpus = jsonl(tmp_path / "corpus.jsonl", *({"text": text} for text in texts))
    ids = [tiny_tokenizer.encode(text, add_special_tokens=False) for text in texts]
    options = {"order": order, "threshold": threshold, "discount": discount}
    if not counted(ids, order):
        with pytest.raises(CorpusError, match="has no text of"):
            build(tiny_tokenizer, [corpus], tmp_path / "out", **options)
        return
    built = build(tiny_tokenizer, [corpus], tmp_path / "out", **options)
    matrix = load_matrix(tmp_path / "out", tiny_tokenizer, 257)
    assert (built.order, built.tokens, matrix.order) == (order, sum(map(len, ids)), order)
    for place, k in enumerate(range(order, 1, -1)):
        wanted = expected(counted(ids, k), -(-threshold // 3**place), discount)
        same(stored(matrix, k), wanted)
        assert built.ngrams[k] == sum(map(len, wanted.values()))


@given(
    texts=st.lists(st.lists(st.integers(0, 2**18 - 1) | st.integers(0, 3), max_size=20), max_size=12),
    order=st.integers(2, 4),
    block=st.integers(1, 50),
)
@settings(max_examples=60, deadline=None)
def test_merge_of_many_runs(
    texts: list[list[int]], order: int, block: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A run a text, in blocks of a few n-grams; with 18 bits a token, four tokens are more than 64."""
    runs = Runs(tmp_path_factory.mktemp("runs"), Packing(order, 18))
    for ids in texts:
        runs.spill(np.array([*ids, -1], np.int32))
    found, before = Counter[tuple[int, ...]](), None
    for records, counts in runs.merged(block):
        ngrams = list(zip(*(column.tolist() for column in runs.packing.unpack(records)), strict=True))
        assert ngrams == sorted(ngrams)
        assert before is None or before < ngrams[0]
        before = ngrams[-1]
        found.update(dict(zip(ngrams, counts.tolist(), strict=True)))
    assert found == counted(texts, order)
    assert runs.total == found.total()


def test_external_merge_changes_nothing(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ({"text": "".join(chr(97 + n * n % (3 + m)) for n in range(40))} for m in range(60))
    corpus = jsonl(tmp_path / "corpus.jsonl", *rows)
    build(tiny_tokenizer, [corpus], tmp_path / "one", order=4, threshold=1)
    spilled = []
    spill = Runs.spill
    monkeypatch.setattr(Runs, "spill", lambda self, ids: (spilled.append(len(ids)), spill(self, ids)))
    monkeypatch.setattr(module, "BYTES_PER_TOKEN", 2_000)
    build(tiny_tokenizer, [corpus], tmp_path / "many", order=4, threshold=1, memory=1)
    assert len(spilled) >= 3 * 4, "there was nothing to merge"
    name = module.FILE
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "many" / name).read_bytes()


@pytest.mark.parametrize("memory", [1, 256])
def test_what_the_model_could_have_said(
    memory: int, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts by probability, `weight` a place, beside the counts of text."""
    if memory == 1:
        monkeypatch.setattr(module, "BYTES_PER_TOKEN", 500_000)  # two n-grams a run
    text = tiny_tokenizer.encode("abc")
    told = {3: ([5, 9], [np.log(0.75), np.log(0.25)]), 4: ([6, 7], [np.log(0.9), np.log(0.01)])}
    samples = [Sample([*text, 5, 6], [0] * 3 + [1] * 2, told), Sample([8, *text], [0, 1, 1, 1])]
    manifest = Manifest(tmp_path / "d")
    manifest.open({"tokenizer": fingerprint(tiny_tokenizer)})
    write_shard(tmp_path / "d", 0, samples, 2, {"samples": 2})
    corpus = jsonl(tmp_path / "corpus.jsonl", {"text": "abc"})
    options = {"order": 4, "threshold": 1, "weight": 8, "memory": memory}
    built = build(tiny_tokenizer, [tmp_path / "d", corpus], tmp_path / "out", **options)
    assert built.weight == 8
    matrix = load_matrix(tmp_path / "out", tiny_tokenizer, 257)
    a, b, c = text
    bigrams = {(8, a): 1, (a, b): 2, (b, c): 2, (c, 5): 6, (c, 9): 2, (5, 6): 7}
    same(stored(matrix, 2), expected(Counter(bigrams), 1, 0.75))
    fours = {(8, a, b, c): 1, (a, b, c, 5): 6, (a, b, c, 9): 2, (b, c, 5, 6): 7}
    same(stored(matrix, 4), expected(Counter(fours), 1, 0.75))


def test_only_the_likeliest_successors(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    letters = [chr(33 + n) for n in range(SUCCESSORS + 8)]
    rows = [{"text": f"Q{letter}"} for n, letter in enumerate(letters) for _ in range(n + 1)]
    build(tiny_tokenizer, [jsonl(tmp_path / "c.jsonl", *rows)], tmp_path / "out", order=2, threshold=1)
    table = stored(load_matrix(tmp_path / "out", tiny_tokenizer, 257), 2)
    (context,) = tiny_tokenizer.encode("Q")
    assert list(table[context,]) == [tiny_tokenizer.encode(letter)[0] for letter in letters[: -SUCCESSORS - 1 : -1]]


def test_kinds_of_corpora(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Conversations pass the chat template; text may be gzipped, and have a byte order mark."""
    chat = jsonl(tmp_path / "chat.jsonl", {"turns": ["hi", "and"], "reference": ["ho", "so"], "system": "be"})
    plain = tmp_path / "plain.txt"
    plain.write_bytes("\ufeffsüß\n".encode())
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps({"text": "zip"}).encode()))
    built = build(tiny_tokenizer, [chat, plain, packed], tmp_path / "out", order=2, threshold=1, discount=0)
    matrix = stored(load_matrix(tmp_path / "out", tiny_tokenizer, 257), 2)
    texts = ["system: be\nuser: hi\nassistant: ho\nuser: and\nassistant: so\n", "süß\n", "zip"]
    same(matrix, expected(counted([tiny_tokenizer.encode(text) for text in texts], 2), 1, 0))
    assert [source.texts for source in built.corpus] == [1, 1, 1]
    provenance = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert [source["name"] for source in provenance["corpus"]] == ["chat.jsonl", "plain.txt", "packed.jsonl.gz"]
    assert {"tokenizer", "threshold", "discount", "ngrams"} < provenance.keys()


def test_long_plain_text(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Pieces end at lines, else at words, and nothing is lost between them."""
    lines = tmp_path / "lines.txt"
    lines.write_text("abcdefg\n" * 30_000)
    words = tmp_path / "words.txt"
    words.write_text("abc de " * 30_000)
    built = build(tiny_tokenizer, [lines, words], tmp_path / "out", order=2, threshold=1)
    assert [source.tokens for source in built.corpus] == [240_000, 210_000]
    assert all(source.texts > 3 for source in built.corpus)
    wanted = {"abcdefg\n": 7, "abc de ": 7}
    found = stored(load_matrix(tmp_path / "out", tiny_tokenizer, 257), 2)
    pairs = {a + b for text in wanted for a, b in zip(text, text[1:] + text[0], strict=True)}
    assert {(*context, token) for context, row in found.items() for token in row} <= {
        tuple(tiny_tokenizer.encode(pair)) for pair in pairs
    }


BAD = {
    "missing": (None, "cannot read .*missing"),
    "empty": (b"", "is empty"),
    "blank": (b" \n\n", "is empty"),
    "binary": (b"\x7fELF\x02\0\0\0" * 100, "is binary|not UTF-8"),
    "latin-1": ("Grüße".encode("latin-1"), "not UTF-8"),
    "half.jsonl": (b'{"text": "cut \\ud83d short"}\n', "half a character"),
    "cut.gz": (gzip.compress(b"some text " * 1000)[:-20], "damaged gzip"),
    "garbage.gz": (b"\x1f\x8b" + bytes(range(100)), "damaged gzip"),
    "broken.jsonl": (b'{"text": "good"}\n{"text": \n', "line 2"),
    "deep.jsonl": (b"[" * 100_000, "line 1: it is nested too deeply"),
    "digits.jsonl": (b"9" * 5000, "line 1: it has a number with too many digits"),
    "list.jsonl": (b'["text"]\n', "line 1"),
    "other.jsonl": (b'{"prompt": "x"}\n', "line 1.*'turns'"),
    "number.jsonl": (b'{"turns": [1], "reference": [2]}\n', "line 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_corpora(name: str, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    good, bad, (content, message) = jsonl(tmp_path / "good.jsonl", {"text": "fine"}), tmp_path / name, BAD[name]
    if content is not None:
        bad.write_bytes(content)
    with pytest.raises(CorpusError, match=message) as error:
        build(tiny_tokenizer, [good, bad], tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_folder_as_corpus(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="is not a folder that 'paceline train data' wrote"):
        build(tiny_tokenizer, [tmp_path], tmp_path / "out")


@pytest.mark.parametrize("where", ["spill", "assemble"])
def test_full_disk(
    where: str, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, out = jsonl(tmp_path / "c.jsonl", {"text": "abc" * 50}), tmp_path / "out"
    build(tiny_tokenizer, [corpus], out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*{"spill": (Runs, "spill", full), "assemble": (module, "assemble", full)}[where])
    for folder in (out, tmp_path / "new"):
        with pytest.raises(DiskFull, match="is full"):
            build(tiny_tokenizer, [corpus], folder, order=2)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert not (tmp_path / "new").exists()


def test_out_is_no_folder(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    corpus = jsonl(tmp_path / "c.jsonl", {"text": "abc"})
    with pytest.raises(ModelError, match="cannot write"):
        build(tiny_tokenizer, [corpus], corpus / "out")


@pytest.mark.parametrize(
    "options",
    [{"order": 1}, {"order": 5}, {"threshold": 0}, {"discount": 1.0}, {"discount": -1}, {"weight": 0}, {"memory": 0}],
)
def test_bad_options(options: dict[str, int], tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    corpus = jsonl(tmp_path / "c.jsonl", {"text": "abc"})
    with pytest.raises(OptionError, match=next(iter(options))):
        build(tiny_tokenizer, [corpus], tmp_path / "out", **options)


def test_no_corpus(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="at least one corpus"):
        build(tiny_tokenizer, [], tmp_path / "out")


def test_progress(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    corpus = [jsonl(tmp_path / f"{n}.jsonl", {"text": "abcabc" * 9}) for n in range(3)]
    seen: dict[str, list[float]] = {}

    def stage(text: str, total: int):  # type: ignore[no-untyped-def]
        seen[text] = []
        return lambda done: seen[text].append(done / total)

    build(tiny_tokenizer, corpus, tmp_path / "out", stage=stage)
    assert list(seen) == ["Counting n-grams", "Merging 3-grams", "Merging 2-grams"]
    for shares in seen.values():
        assert shares == sorted(shares)
        assert shares[-1] == 1


def test_automatic_threshold() -> None:
    assert [automatic(tokens) for tokens in (10, 5_000_000, 500_000_000, 10**9, 10**12)] == [2, 2, 6, 12, 12]
