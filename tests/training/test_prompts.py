"""Conversations from JSONL files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from paceline.errors import CorpusError
from paceline.training.data.prompts import Conversation, read_prompts


def written(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "turns": ["one", "two"], "reference": ["ignored", "too"], "system": "Be brief."},
        {"prompt": "three"},
        {"text": "Once upon"},
        {"prompt": "three"},
    ]
    found = read_prompts([written(tmp_path / "p.jsonl", *rows)])
    assert found == [
        Conversation(("one", "two"), "Be brief."),
        Conversation(("three",)),
        Conversation(("Once upon",), raw=True),
    ]


def test_gzip_and_limit(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"prompt": str(i)}) + "\n\n" for i in range(5))
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(gzip.compress(lines.encode()))
    other = written(tmp_path / "q.jsonl", {"prompt": "0"}, {"prompt": "x"})
    assert [c.turns[0] for c in read_prompts([path, other], limit=2)] == ["0", "1", "x"]


@pytest.mark.parametrize(
    "row", [["a"], {"turns": []}, {"turns": ["a", ""]}, {"turns": "a"}, {"prompt": 3}, {"prompt": "a", "system": 1}, {}]
)
def test_wrong_schema(tmp_path: Path, row: object) -> None:
    path = written(tmp_path / "p.jsonl", {"prompt": "fine"}, row)
    with pytest.raises(CorpusError, match=r"p\.jsonl, line 2: expected a JSON object with 'turns'"):
        read_prompts([path])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b'{"prompt": "a"}\n{"pro', "line 2"),
        (b'{"prompt": "\xe9"}\n', "not UTF-8"),
        (b"\x1f\x8b broken", "damaged gzip"),
        (b"[" * 100_000, "line 1: it is nested too deeply"),
        (b'{"text": "a \\ud83d"}', "line 1: half a character"),
        (b'{"turns": ["a"], "system": "\\ud83d"}', "line 1: half a character"),
    ],
)
def test_unreadable(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=says):
        read_prompts([path])


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="nowhere"):
        read_prompts([tmp_path / "nowhere.jsonl"])
