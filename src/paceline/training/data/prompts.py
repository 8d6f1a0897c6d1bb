"""Prompts to generate training text from: conversations in JSONL files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.drafting.corpus.texts import is_whole, open_text
from paceline.errors import CorpusError
from paceline.files import read_json


@dataclass(frozen=True)
class Conversation:
    """What the user says; the model's answers are to be generated.

    Attributes:
        turns: the user's messages, one or more.
        system: a message before them.
        raw: the only turn is a text to go on with as it stands, not a message.
    """

    turns: tuple[str, ...]
    system: str | None = None
    raw: bool = False


def read_prompts(paths: Sequence[Path], limit: int | None = None) -> list[Conversation]:
    """The conversations of JSONL files (`.gz` too), each once.

    A row holds `turns` (the user's messages; `reference`, their answers, is not looked at), or one message as `prompt`,
    or as `text` a text to go on with; and perhaps a `system` message.

    Args:
        limit: first rows of each file.

    Raises:
        CorpusError: a file that is missing, empty or not UTF-8, or a row of another form, by its line.
    """
    found: dict[Conversation, None] = {}
    for path in paths:
        before, rows = len(found), 0
        for rows, conversation in enumerate(_rows(path), start=1):
            found[conversation] = None
            if rows == limit:
                break
        if len(found) == before and not rows:
            raise CorpusError(f"{path} is empty: it has no prompts")
    return list(found)


def _rows(path: Path) -> Iterator[Conversation]:
    with open_text(path) as (text, _):
        for number, line in enumerate(text, start=1):
            if line.strip():
                try:
                    yield _conversation(read_json(line))
                except json.JSONDecodeError as error:
                    told = f"not JSON ({error.msg} at column {error.colno})"
                    raise CorpusError(f"{path}, line {number}: {told}") from error
                except ValueError as error:
                    raise CorpusError(f"{path}, line {number}: {error}") from error


def _conversation(row: object) -> Conversation:
    if isinstance(row, dict):
        turns = row.get("turns", [row.get("prompt", row.get("text"))])
        valid = isinstance(turns, list) and turns and all(isinstance(turn, str) and turn.strip() for turn in turns)
        if valid and isinstance(row.get("system"), str | None):
            if not all(map(is_whole, (*turns, row.get("system") or ""))):  # which no tokenizer takes
                raise ValueError("half a character (a lone surrogate, such as \\ud83d) in a text")
            return Conversation(tuple(turns), row.get("system") or None, raw="turns" not in row and "prompt" not in row)
    raise ValueError("expected a JSON object with 'turns' (a list of texts), 'prompt' or 'text', none of them empty")
