"""`paceline trigram build`: the n-grams of a corpus, counted in one pass and bounded memory, into a matrix file."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from paceline.drafters.trigram.corpus import chat_format, texts
from paceline.drafters.trigram.matrix import FILE, FORMAT, ORDERS, dtypes, fingerprint, matrix_folder, token_bits
from paceline.drafters.trigram.runs import Packing, Runs
from paceline.drafters.trigram.table import TableWriter, assemble
from paceline.errors import CorpusError, DiskFull, ModelError
from paceline.registry import require
from paceline.targets import store
from paceline.targets.loading import first_line, quiet
from paceline.targets.progress import Stage, bars
from paceline.targets.sources import resolve

PROVENANCE = "provenance.json"
BATCH = 1 << 20  # characters tokenized at a time
BYTES_PER_TOKEN = 100  # of memory while the n-grams of buffered tokens are packed and sorted, or merged


@dataclass(frozen=True)
class Source:
    """A corpus file that was read."""

    name: str
    bytes: int
    sha256: str
    texts: int
    tokens: int


@dataclass(frozen=True)
class Built:
    """What a build made; `provenance.json` holds it too, except for the time."""

    model: str
    tokenizer: str  # its fingerprint
    order: int
    threshold: int
    discount: float
    corpus: list[Source]
    tokens: int
    ngrams: dict[int, int]  # stored, by order
    bytes: int  # of the matrix file
    seconds: float


def build(
    tokenizer: PreTrainedTokenizerBase,
    corpus: Sequence[Path],
    out: Path,
    *,
    model: str = "",
    order: int = 3,
    threshold: int | None = None,
    discount: float = 0.75,
    memory: int = 256,
    stage: Stage = lambda text, total: lambda done: None,
) -> Built:
    """Write the matrix of the n-grams in `corpus`, and its provenance, to the folder `out`: both or neither.

    Args:
        model: its name, for the record.
        order: n; shorter n-grams down to 2 are stored too, for contexts that were never seen in full.
        threshold: n-grams seen less often are dropped. None: `automatic`. Each shorter order has a third of the
            longer one's, rounded up: they are few, and what there is to fall back on.
        discount: taken off every count before division by the context's total, P = (c - discount) / total, so that a
            context seen once is not certain of what follows (absolute discounting). The paper's P = c / total is 0.
        memory: MB to work in, besides what Python and the tokenizer take. More means fewer, longer runs.
        stage: progress bars: `stage(text, total)` gives the function that sets how far it is.

    Raises:
        CorpusError: a file is missing, empty, binary, not UTF-8 or malformed, or all of it is too short.
        OptionError: an option is out of range.
        DiskFull: nothing half-written stays.
        ModelError: `out` cannot be written.
    """
    require(len(corpus) > 0, "trigram build: name at least one corpus file")
    require(order in ORDERS, f"trigram build: order must be one of {', '.join(map(str, ORDERS))}, not {order}")
    require(threshold is None or threshold >= 1, f"trigram build: threshold must be >= 1, not {threshold}")
    require(0 <= discount < 1, f"trigram build: discount must be at least 0 and below 1, not {discount}")
    require(memory >= 1, f"trigram build: memory must be >= 1 MB, not {memory}")
    started = time.perf_counter()
    vocab = max(tokenizer.get_vocab().values()) + 1
    kinds, room = dtypes(order, vocab), memory * 1_000_000 // BYTES_PER_TOKEN
    with _workplace(out) as work:
        runs = [Runs(work, Packing(k, token_bits(vocab))) for k in range(order, 1, -1)]
        sources = _count(tokenizer, corpus, runs, room, stage)
        tokens = sum(source.tokens for source in sources)
        if not runs[0].total:
            raise CorpusError(f"the corpus has no text of {order} tokens or more")
        threshold = automatic(tokens) if threshold is None else threshold
        tables = []
        for place, run in enumerate(runs):
            table = TableWriter(work, run.packing, vocab, kinds, -(-threshold // 3**place), discount)
            _merge(run, table, room, stage)
            tables.append(table)
        owner = {"tokenizer": fingerprint(tokenizer), "model": model}
        assemble(tables, kinds, {"format": FORMAT, "order": str(order), "vocab": str(vocab), **owner}, work / FILE)
        built = Built(
            **owner,
            order=order,
            threshold=threshold,
            discount=discount,
            corpus=sources,
            tokens=tokens,
            ngrams={table.order: table.ngrams for table in tables},
            bytes=(work / FILE).stat().st_size,
            seconds=round(time.perf_counter() - started, 1),
        )
        facts = {key: value for key, value in asdict(built).items() if key != "seconds"}
        (work / PROVENANCE).write_text(json.dumps(facts, indent=1) + "\n")
        for name in (FILE, PROVENANCE):
            os.replace(work / name, out / name)
    return built


def build_for(
    model: str, corpus: Sequence[Path], out: Path | None = None, *, progress: bool = True, **options: Any
) -> Built:
    """`build` with the tokenizer of a model named as users name it, into the folder where the drafter looks by itself
    unless `out` is given.

    Raises:
        ModelError: there is no such model, or it has no tokenizer that can be used.
    """
    from transformers import AutoTokenizer  # takes a second

    source = resolve(model, progress=progress)
    with quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(source.location, revision=source.revision)
        except Exception as error:  # transformers raises anything from KeyError to RuntimeError
            raise ModelError(f"cannot use the tokenizer of {model}: {first_line(error)}") from error
    with bars(progress) as stage:
        return build(tokenizer, corpus, out or matrix_folder(source.location), model=model, stage=stage, **options)


def automatic(tokens: int) -> int:
    """The threshold for a corpus of so many tokens: the paper's 12 from a billion tokens on (its corpora), at least 2:
    at 5 million tokens, keeping the trigrams that occurred once triples the file for 0.3 % more tokens a pass.
    """
    return int(np.clip(round(12 * tokens / 1e9), 2, 12))


def _count(
    tokenizer: PreTrainedTokenizerBase, corpus: Sequence[Path], runs: Sequence[Runs], room: int, stage: Stage
) -> list[Source]:
    """Read and tokenize the corpus; every `room` tokens become a run of each order."""
    sizes = [path.stat().st_size if path.is_file() else 0 for path in corpus]
    seen, before = stage("Counting n-grams", sum(sizes)), 0
    chat, sources = chat_format(tokenizer), []
    buffer, buffered = list[np.ndarray](), 0

    def spill() -> None:
        nonlocal buffered
        if buffer:
            ids = np.concatenate(buffer)
            buffer.clear()
            buffered = 0
            for run in runs:
                run.spill(ids)

    def moved(before: int, at: int) -> None:
        seen(before + at)

    for path, size in zip(corpus, sizes, strict=True):
        count = tokens = 0
        for ids in _encoded(tokenizer, texts(path, chat, partial(moved, before))):
            buffer.append(np.array([*ids, -1], np.int32))
            buffered += len(buffer[-1])
            count, tokens = count + 1, tokens + len(ids)
            if buffered >= room:
                spill()
        sources.append(Source(path.name, size, store.sha256(path), count, tokens))
        before += size
    spill()
    return sources


def _encoded(tokenizer: PreTrainedTokenizerBase, pieces: Iterable[str]) -> Iterator[list[int]]:
    batch, length = list[str](), 0
    for piece in pieces:
        batch.append(piece)
        length += len(piece)
        if length >= BATCH:
            yield from _ids(tokenizer, batch)
            batch, length = [], 0
    if batch:
        yield from _ids(tokenizer, batch)


def _ids(tokenizer: PreTrainedTokenizerBase, batch: list[str]) -> list[list[int]]:
    # verbose warns of texts longer than the model's context, which do no harm here
    return tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def _merge(run: Runs, table: TableWriter, room: int, stage: Stage) -> None:
    seen, done = stage(f"Merging {table.order}-grams", run.total), 0
    for block in run.merged(room // 2):
        table.add(block)
        done += int(block[1].sum())
        seen(done)
    table.finish()


@contextmanager
def _workplace(out: Path) -> Iterator[Path]:
    """A folder inside `out` that is gone in the end; a failure takes back `out` too, if it was not there before.

    Raises DiskFull or ModelError for the system's errors.
    """
    fresh = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".building-", dir=out) as work:
            yield Path(work)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"the disk of {out} is full: make room, or build somewhere else") from error
        raise ModelError(f"cannot write to {error.filename or out}: {error.strerror}") from error
    finally:
        if fresh and out.is_dir() and not any(out.iterdir()):
            out.rmdir()
