"""`paceline trigram build`: the n-grams of a corpus, counted in one pass and bounded memory, into a matrix file."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from paceline.drafters.trigram.matrix import FILE, FORMAT, ORDERS, dtypes, matrix_folder, token_bits
from paceline.drafters.trigram.runs import Packing, Runs
from paceline.drafters.trigram.table import TableWriter, assemble
from paceline.drafting.corpus.tokenized import PROVENANCE, Corpus, CorpusSource, tokenizer_of, workplace
from paceline.errors import CorpusError, require
from paceline.targets.progress import Stage, bars
from paceline.targets.tokenizers import fingerprint

BYTES_PER_TOKEN = 100  # of memory while the n-grams of buffered tokens are packed and sorted, or merged
_BETWEEN = np.array([-1], np.int32)  # texts


@dataclass(frozen=True)
class MatrixBuild:
    """What a build made; `provenance.json` holds it too, except for the time."""

    model: str
    tokenizer: str  # its fingerprint
    order: int
    threshold: int
    discount: float
    weight: int
    corpus: list[CorpusSource]
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
    weight: int = 16,
    memory: int = 256,
    stage: Stage = lambda text, total: lambda done: None,
) -> MatrixBuild:
    """Write the matrix of the n-grams in `corpus`, and its provenance, to the folder `out`: both or neither.

    Args:
        model: its name, for the record.
        order: n; shorter n-grams down to 2 are stored too, for contexts that were never seen in full.
        threshold: n-grams seen less often are dropped. None: `automatic`. Each shorter order has a third of the
            longer one's, rounded up: they are few, and what there is to fall back on.
        discount: taken off every count before division by the context's total, P = (c - discount) / total, so that a
            context seen once is not certain of what follows (absolute discounting). The paper's P = c / total is 0.
        weight: how often a place counts for which the corpus tells what the model could have said (see `Text`), shared
            out by probability; a token of plain text counts once. A hundred thousand such tokens are worth millions.
        memory: MB to work in, besides what Python and the tokenizer take. More means fewer, longer runs.
        stage: progress bars: `stage(text, total)` gives the function that sets how far it is.

    Raises:
        CorpusError: a file is missing, empty, binary, not UTF-8 or malformed, or all of it is too short.
        OptionError: an option is out of range.
        DiskFull: nothing half-written stays.
        ModelError: `out` cannot be written.
    """
    require(order in ORDERS, f"trigram build: order must be one of {', '.join(map(str, ORDERS))}, not {order}")
    require(threshold is None or threshold >= 1, f"trigram build: threshold must be >= 1, not {threshold}")
    require(0 <= discount < 1, f"trigram build: discount must be at least 0 and below 1, not {discount}")
    require(weight >= 1, f"trigram build: weight must be >= 1, not {weight}")
    require(memory >= 1, f"trigram build: memory must be >= 1 MB, not {memory}")
    started = time.perf_counter()
    source = Corpus(tokenizer, corpus, stage, "Counting n-grams")
    vocab = source.vocab
    kinds, room = dtypes(order, vocab), memory * 1_000_000 // BYTES_PER_TOKEN
    with workplace(out, (FILE, PROVENANCE)) as work:
        runs = [Runs(work, Packing(k, token_bits(vocab))) for k in range(order, 1, -1)]
        _count(source, runs, room, weight)
        tokens = sum(part.tokens for part in source.sources)
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
        built = MatrixBuild(
            **owner,
            order=order,
            threshold=threshold,
            discount=discount,
            weight=weight,
            corpus=source.sources,
            tokens=tokens,
            ngrams={table.order: table.ngrams for table in tables},
            bytes=(work / FILE).stat().st_size,
            seconds=round(time.perf_counter() - started, 1),
        )
        facts = {key: value for key, value in asdict(built).items() if key != "seconds"}
        (work / PROVENANCE).write_text(json.dumps(facts, indent=1) + "\n")
    return built


def build_for(model: str, corpus: Sequence[Path], out: Path | None = None, **options: Any) -> tuple[MatrixBuild, Path]:
    """`build` with the tokenizer of a model named as users name it, into the folder where the drafter looks by itself
    unless `out` is given. Returns the folder as well.

    Raises:
        ModelError: there is no such model, or it has no tokenizer that can be used.
    """
    tokenizer, source = tokenizer_of(model)
    folder = out or matrix_folder(source.key)
    with bars(True) as stage:
        return build(tokenizer, corpus, folder, model=model, stage=stage, **options), folder


def automatic(tokens: int) -> int:
    """The threshold for a corpus of so many tokens: the paper's 12 from a billion tokens on (its corpora), at least 2:
    at 5 million tokens, keeping the trigrams that occurred once triples the file for 0.3 % more tokens a pass.
    """
    return int(np.clip(round(12 * tokens / 1e9), 2, 12))


def _count(corpus: Corpus, runs: Sequence[Runs], room: int, weight: int) -> None:
    """Read the corpus; about every `room` n-grams become a run of each order."""
    texts, said, counts = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()

    def spill() -> None:
        for run in runs:
            if texts:
                run.spill(np.concatenate(texts))
            if said:
                run.spill_counted(np.concatenate(said), np.concatenate(counts))
        for buffer in (texts, said, counts):
            buffer.clear()

    buffered = 0
    for text in corpus:
        if text.said is None or text.p is None:
            texts += [text.ids, _BETWEEN]
            buffered += len(text.ids) + 1
        else:
            times = np.rint(weight * text.p).astype(np.int64)
            said.append(text.said[times > 0])
            counts.append(times[times > 0])
            buffered += len(counts[-1])
        if buffered >= room:
            spill()
            buffered = 0
    spill()


def _merge(run: Runs, table: TableWriter, room: int, stage: Stage) -> None:
    seen, done = stage(f"Merging {table.order}-grams", run.total), 0
    for block in run.merged(room // 2):
        table.add(block)
        done += int(block[1].sum())
        seen(done)
    table.finish()
