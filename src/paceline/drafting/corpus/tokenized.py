"""Corpora as token ids, and the folders built from them: what n-gram matrices and datastores have in common."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from jaxtyping import Float, Integer
from safetensors import SafetensorError
from safetensors.numpy import load_file

from paceline.drafting.corpus.texts import Chat, chat_format, open_text, texts
from paceline.errors import CorpusError, DiskFull, ModelError, TokenizerMismatch, first_line, require
from paceline.files import is_full, read_json
from paceline.targets.loading import quiet
from paceline.targets.progress import Stage
from paceline.targets.sources import ModelSource, resolve
from paceline.targets.store import sha256
from paceline.targets.tokenizers import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROVENANCE = "provenance.json"
BUILDING, LOCK = ".building-", ".lock"  # folders of builds that are going on, and what each holds in its own
BATCH = 1 << 20  # characters tokenized at a time
CONTEXT = 3  # tokens of a prompt that are read with the answer to it: what 4-grams look back on

Moved = Callable[[int], None]


class Text(NamedTuple):
    """A text of a corpus, and where the model that wrote it told what else it could have said.

    Attributes:
        said: n-grams that end in one of the model's likeliest tokens at a place, the token that stands there or
            another; -1 where there is no token so far back.
        p: how likely the model took it to be.
    """

    ids: Integer[np.ndarray, " tokens"]
    said: Integer[np.ndarray, "ngrams window"] | None = None
    p: Float[np.ndarray, " ngrams"] | None = None


@dataclass(frozen=True)
class CorpusSource:
    """A file, or a folder of samples, that was read."""

    name: str
    bytes: int
    sha256: str
    texts: int
    tokens: int


class Corpus:
    """The texts of files, as token ids; the progress of reading them is told as it goes.

    A folder is what `paceline train data` wrote: of its samples, what is to be learnt. Anything else is text, see
    `texts`.

    Attributes:
        sources: what has been read, complete once the iteration is.
        vocab: token ids are below this.

    Raises:
        CorpusError: a file is missing; while it is read: one is empty, binary, not UTF-8 or malformed.
        TokenizerMismatch: samples are in another tokenizer's tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, paths: Sequence[Path], stage: Stage, title: str) -> None:
        require(len(paths) > 0, "name at least one corpus file")
        for path in paths:
            if not path.is_dir():
                with open_text(path):  # one that is not there is told of before anything else is done
                    pass
        self.tokenizer, self.paths, self.sources = tokenizer, paths, list[CorpusSource]()
        self.vocab = max(tokenizer.get_vocab().values()) + 1
        self._stage, self._title = stage, title

    def __iter__(self) -> Iterator[Text]:
        files = [_files(path) for path in self.paths]
        sizes = [sum(file.stat().st_size for file in part if file.is_file()) for part in files]
        seen, before = self._stage(self._title, sum(sizes)), 0
        chat = chat_format(self.tokenizer)
        for path, parts, size in zip(self.paths, files, sizes, strict=True):
            count = tokens = 0
            for text in self._read(path, parts, chat, partial(_moved, seen, before)):
                count, tokens = count + 1, tokens + len(text.ids)
                yield text
            self.sources.append(CorpusSource(path.name, size, _sha256(parts), count, tokens))
            before += size

    def _read(self, path: Path, parts: Sequence[Path], chat: Chat, moved: Moved) -> Iterator[Text]:
        if path.is_dir():
            self._check_owner(path)
            yield from _samples(path, parts, self.vocab, moved)
            return
        batch, length = list[str](), 0
        for piece in texts(path, chat, moved):
            batch.append(piece)
            length += len(piece)
            if length >= BATCH:
                yield from self._encoded(batch)
                batch, length = [], 0
        if batch:
            yield from self._encoded(batch)

    def _check_owner(self, folder: Path) -> None:
        try:
            owner = read_json((folder / "manifest.json").read_text(encoding="utf-8"))["made"]["tokenizer"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorpusError(f"{folder} is not a folder that 'paceline train data' wrote") from error
        if owner != fingerprint(self.tokenizer):
            raise TokenizerMismatch(f"the samples in {folder} are those of a model with another tokenizer")

    def _encoded(self, batch: list[str]) -> Iterable[Text]:
        # verbose warns of texts longer than the model's context, which do no harm here
        encoded = self.tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return (Text(np.array(ids, np.int32)) for ids in encoded["input_ids"])


def _moved(seen: Moved, before: int, at: int) -> None:
    seen(before + at)


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def _sha256(files: Sequence[Path]) -> str:
    if len(files) == 1:
        return sha256(files[0])
    return hashlib.sha256("".join(map(sha256, files)).encode()).hexdigest()


def _samples(folder: Path, shards: Sequence[Path], vocab: int, moved: Moved) -> Iterator[Text]:
    """What is to be learnt, and the few tokens before it."""
    if not shards:
        raise CorpusError(f"{folder} has no samples")
    read = 0
    for shard in shards:
        try:
            arrays = load_file(shard)
            ids, mask, offsets, top, logp = (arrays[name] for name in ("ids", "mask", "offsets", "top_ids", "top_logp"))
        except (SafetensorError, OSError, KeyError) as error:
            raise CorpusError(f"{shard} is not a shard of samples: {first_line(error)}") from error
        if len(ids) and not (ids.min() >= 0 and max(ids.max(), top.max(initial=0)) < vocab):
            raise CorpusError(f"{shard} has tokens that the tokenizer does not know")
        for start, stop in pairwise(offsets):
            edges = np.flatnonzero(np.diff(mask[start:stop] != 0, prepend=False, append=False))
            for first, last in zip(edges[::2] + start, edges[1::2] + start, strict=True):
                begin = max(first - CONTEXT, start)
                yield _answer_text(ids[begin:last].astype(np.int32), top[begin:last], logp[begin:last])
        read += shard.stat().st_size
        moved(read)


def _answer_text(ids: np.ndarray, top: np.ndarray, logp: np.ndarray) -> Text:
    """A text with the model's likeliest tokens at each place, of which unknown ones are negative."""
    place, rank = np.nonzero(top >= 0)
    if len(place) == 0:
        return Text(ids)
    before = np.concatenate([np.full(CONTEXT, -1, np.int32), ids])
    said = np.stack([*(before[place + back] for back in range(CONTEXT)), top[place, rank]], 1)
    return Text(ids, said, np.exp(logp[place, rank].astype(np.float32)))


def tokenizer_of(model: str) -> tuple[PreTrainedTokenizerBase, ModelSource]:
    """The tokenizer of a model named as users name it, and where the model is.

    Raises:
        ModelError: there is no such model, or it has no tokenizer that can be used.
    """
    from transformers import AutoTokenizer  # takes a second

    source = resolve(model, weights=False)
    with quiet():
        try:
            return AutoTokenizer.from_pretrained(source.location, revision=source.revision), source
        except Exception as error:  # transformers raises anything from KeyError to RuntimeError
            raise ModelError(f"cannot use the tokenizer of {model}: {first_line(error)}") from error


@contextmanager
def workplace(out: Path, results: Sequence[str]) -> Iterator[Path]:
    """A folder inside `out` whose `results` move to `out` in the end, and which is gone then; a failure takes back
    `out` too, if it was not there before.

    Raises DiskFull or ModelError for the system's errors.
    """
    fresh = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        _sweep(out)
        with TemporaryDirectory(prefix=BUILDING, dir=out) as work, FileLock(Path(work) / LOCK):
            yield Path(work)
            for name in results:
                (Path(work) / name).replace(out / name)
    except (OSError, SafetensorError) as error:
        if is_full(error):
            raise DiskFull(f"the disk of {out} is full: make room, or build somewhere else") from error
        if isinstance(error, SafetensorError):
            raise ModelError(f"cannot write to {out}: {first_line(error)}") from error
        raise ModelError(f"cannot write to {error.filename or out}: {error.strerror}") from error
    finally:
        if fresh and out.is_dir() and not any(out.iterdir()):
            out.rmdir()


def _sweep(out: Path) -> None:
    """Remove what builds that were killed left in `out`; one that runs holds its lock."""
    for left in out.glob(f"{BUILDING}*"):
        with suppress(Timeout), FileLock(left / LOCK, timeout=0):
            shutil.rmtree(left)
