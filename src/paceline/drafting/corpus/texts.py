"""Texts of corpus files, streamed: plain text or JSONL, gzipped or not."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from jinja2 import TemplateError

from paceline.errors import CorpusError
from paceline.files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECE = 1 << 16  # characters of plain text at a time

#: A conversation as one text.
Chat = Callable[[list[dict[str, str]]], str]


def chat_format(tokenizer: PreTrainedTokenizerBase) -> Chat:
    """Conversations as the model reads them: through its chat template, or as paragraphs where it has none."""
    if not tokenizer.chat_template:
        return lambda messages: "\n\n".join(message["content"] for message in messages)
    return lambda messages: str(tokenizer.apply_chat_template(messages, tokenize=False))


def texts(path: Path, chat: Chat, moved: Callable[[int], None] = lambda _: None) -> Iterator[str]:
    """The texts of one file.

    A name with `.jsonl` in its extensions holds one JSON object a line: `{"text": ...}`, or a conversation
    `{"turns": [...], "reference": [...]}`, user messages and the answers to them. Anything else is plain text,
    given in pieces of at most `PIECE` characters that end where a line (or else a word) does.

    Args:
        moved: told how many bytes of the file have been read.

    Raises:
        CorpusError: the file is missing, empty, binary, not UTF-8, damaged, or has a row of another form.
    """
    empty = True
    with open_text(path) as (text, position):
        for piece in _rows(path, text, chat) if ".jsonl" in path.suffixes else _pieces(text):
            if "\0" in piece:
                raise CorpusError(f"{path} is binary, not text")
            if not is_whole(piece):  # which no tokenizer takes
                raise CorpusError(f"{path} has half a character (a lone surrogate, such as \\ud83d) in a text")
            if piece.strip():
                empty = False
                yield piece
            moved(position())
    if empty:
        raise CorpusError(f"{path} is empty: it has no text")


def is_whole(text: str) -> bool:
    """Whether it is text that can be encoded: not, if it has a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def open_text(path: Path) -> Iterator[tuple[TextIO, Callable[[], int]]]:
    """The text of a file, gzipped or not, and a function that tells how many bytes have been read.

    Raises CorpusError, also out of the `with` block, for a file that cannot be opened or read as UTF-8.
    """
    try:
        with path.open("rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            with _decoded(file, compressed) as text:
                yield text, file.tell
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path} is not UTF-8 text ({error.reason})") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CorpusError(f"{path} is a damaged gzip file ({error})") from error
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror}") from error


def _decoded(file: BinaryIO, compressed: bool) -> TextIO:
    stream: Any = gzip.GzipFile(fileobj=file) if compressed else file
    return io.TextIOWrapper(stream, encoding="utf-8-sig")


def _pieces(text: TextIO) -> Iterator[str]:
    rest = ""
    while block := text.read(PIECE - len(rest)):
        block = rest + block
        cut = block.rfind("\n") + 1 or block.rfind(" ") + 1 or len(block)
        if "\0" in block:  # before more of a binary file is decoded, which would blame its encoding
            cut = len(block)
        rest = block[cut:]
        yield block[:cut]
    yield rest


def _rows(path: Path, text: TextIO, chat: Chat) -> Iterator[str]:
    for number, line in enumerate(text, start=1):
        if line.strip():
            try:
                yield _row(read_json(line), chat)
            except (ValueError, TemplateError) as error:
                raise CorpusError(f"{path}, line {number}: {error}") from error


def _row(row: object, chat: Chat) -> str:
    if isinstance(row, dict):
        text = row.get("text")
        if isinstance(text, str):
            return text
        turns, answers = row.get("turns"), row.get("reference")
        if isinstance(turns, list) and isinstance(answers, list) and all(isinstance(t, str) for t in turns + answers):
            messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
            for turn, answer in zip(turns, answers, strict=False):
                messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
            return chat(messages)
    raise ValueError("expected a JSON object with 'text', or with 'turns' and 'reference'")
