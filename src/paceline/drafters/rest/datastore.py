"""The datastore of the drafter rest: the tokens of a corpus and their suffix array, memory-mapped.

One safetensors file holds `tokens` [tokens], the texts one after another with the id `vocab` between them, and
`suffixes` [tokens], the positions in `tokens` in the lexicographic order of what follows there: whatever a text went
on with after a given sequence stands side by side.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Integer
from safetensors.numpy import save_file

from paceline.drafting.corpus.mapped import mapped
from paceline.drafting.corpus.tokenized import PROVENANCE, Corpus, CorpusSource, tokenizer_of, workplace
from paceline.errors import CorpusError, IntegrityError, OptionError, require
from paceline.files import whole
from paceline.targets import store
from paceline.targets.progress import Stage, bars
from paceline.targets.tokenizers import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE = "datastore.safetensors"
FORMAT = "paceline-datastore-1"


class Datastore(NamedTuple):
    """Read-only views of the file, whose pages all processes share."""

    tokens: Integer[np.ndarray, " tokens"]
    suffixes: Integer[np.ndarray, " tokens"]
    vocab: int  # the id between texts; token ids are below it


@dataclass(frozen=True)
class DatastoreBuild:
    """What a build made; `provenance.json` holds it too, except for the time."""

    model: str
    tokenizer: str  # its fingerprint
    corpus: list[CorpusSource]
    tokens: int
    bytes: int  # of the file
    seconds: float


def build(
    tokenizer: PreTrainedTokenizerBase,
    corpus: Sequence[Path],
    out: Path,
    *,
    model: str = "",
    stage: Stage = lambda text, total: lambda done: None,
) -> DatastoreBuild:
    """Write the datastore of `corpus` and its provenance to the folder `out`: both or neither.

    The suffix array is made in memory: about 25 bytes a token, twice that with a vocabulary of 65,536 tokens or more.

    Args:
        model: its name, for the record.
        stage: progress bars: `stage(text, total)` gives the function that sets how far it is.

    Raises:
        CorpusError: a file is missing, empty, binary, not UTF-8 or malformed.
        OptionError: the library for suffix arrays is not installed, or the corpus is too large for it.
        DiskFull: nothing half-written stays.
        ModelError: `out` cannot be written.
    """
    try:
        from pydivsufsort import divsufsort
    except ImportError as error:
        raise OptionError("rest build needs pydivsufsort: pip install 'paceline[rest]'") from error
    started = time.perf_counter()
    source = Corpus(tokenizer, corpus, stage, "Reading")
    kind = np.uint16 if source.vocab < 1 << 16 else np.uint32
    between = np.array([source.vocab], kind)
    with workplace(out, (FILE, PROVENANCE)) as work:
        pieces = [piece for text in source if len(text.ids) for piece in (text.ids.astype(kind), between)]
        if not pieces:
            raise CorpusError("the corpus has no tokens")
        tokens = np.concatenate(pieces)
        require(tokens.nbytes < 1 << 31, f"rest build: {len(tokens)} tokens are more than a datastore can hold")
        sorting = stage("Sorting suffixes", 1)
        suffixes = divsufsort(tokens).astype(np.uint32)
        sorting(1)
        owner = {"tokenizer": fingerprint(tokenizer), "model": model}
        facts = {"format": FORMAT, "vocab": str(source.vocab), **owner}
        with whole(work / FILE) as file:
            save_file({"tokens": tokens, "suffixes": suffixes}, file, facts)
        built = DatastoreBuild(
            **owner,
            corpus=source.sources,
            tokens=sum(part.tokens for part in source.sources),
            bytes=(work / FILE).stat().st_size,
            seconds=round(time.perf_counter() - started, 1),
        )
        record = {key: value for key, value in asdict(built).items() if key != "seconds"}
        (work / PROVENANCE).write_text(json.dumps(record, indent=1) + "\n")
    return built


def build_for(model: str, corpus: Sequence[Path], out: Path | None = None) -> tuple[DatastoreBuild, Path]:
    """`build` with the tokenizer of a model named as users name it, into the folder where the drafter looks by itself
    unless `out` is given. Returns the folder as well.

    Raises:
        ModelError: there is no such model, or it has no tokenizer that can be used.
    """
    tokenizer, source = tokenizer_of(model)
    folder = out or datastore_folder(source.key)
    with bars(True) as stage:
        return build(tokenizer, corpus, folder, model=model, stage=stage), folder


def datastore_folder(model: str) -> Path:
    """Where a user's own datastore of a model lies, unless it is said to be elsewhere. `model`: folder or hub id."""
    return store.root() / "rest" / store.entry_name(model)


def load_datastore(path: Path, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> Datastore:
    """Map the datastore at `path` (the file, or a folder that holds it).

    Args:
        tokenizer: of the target; must be the one the datastore was built with.
        vocab_size: of the target; every token must be below it.

    Raises:
        IntegrityError: there is no such file, or it is damaged or something else.
        TokenizerMismatch: it was built with another tokenizer.
    """
    path = path / FILE if path.is_dir() else path
    with mapped(path, FORMAT, tokenizer, "datastore", "paceline rest build") as (facts, array):
        found = Datastore(array("tokens"), array("suffixes"), int(facts["vocab"]))
    if fault := _fault(found, vocab_size):
        raise IntegrityError(f"{path} is damaged ({fault}): build it again")
    return found


def _fault(found: Datastore, vocab_size: int) -> str | None:
    """What in it could make compiled code read outside it, or draft a token that does not exist."""
    tokens, suffixes, vocab = found
    if tokens.ndim != 1 or tokens.shape != suffixes.shape or tokens.dtype not in (np.uint16, np.uint32):
        return "arrays of the wrong shape or type"
    if suffixes.dtype != np.uint32 or len(tokens) == 0 or suffixes.max() >= len(tokens):
        return "a suffix outside the text"
    most = tokens.max(where=tokens != vocab, initial=0)  # `vocab` stands between texts; tokenizers may have more ids
    if tokens.max() > vocab or most >= vocab_size:
        return "a token outside the vocabulary"
    return None
