"""The prompts: conversations by task, from JSONL files or from the `datasets` library."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from paceline.bench.hub import hub_rows
from paceline.errors import OptionError, require

OVERALL = "overall"  # the results' row over all tasks


@dataclass(frozen=True)
class Prompt:
    """A conversation; `turns` are the user's messages."""

    id: str
    task: str
    turns: tuple[str, ...]


class RawRow(NamedTuple):
    """A row as it was read, and what it is called when it does not say."""

    row: Any
    where: str
    id: str
    task: str


def load_suite(source: str, tasks: Sequence[str] = (), limit: int | None = None, turns: int = 1) -> list[Prompt]:
    """The prompts of a suite, task by task in the order of first appearance.

    Args:
        source: a JSONL file (`.gz` too) of `{"id", "task", "turns": [...]}` rows, or with one message as `prompt`; a
            folder of such files; or a `datasets` id, `name[:config=...][:split=...][:column=...]`. A row's `group` is
            its task when it has one (Spec-Bench folds MT-Bench's eight categories into `mt_bench`), else its `task`,
            else the file's name.
        limit: first prompts of each task.
        turns: most turns of a conversation.

    Raises:
        OptionError: naming file and line, when a row cannot be read; for an empty suite; for unknown tasks.
    """
    found: dict[str, list[Prompt]] = {}
    seen: dict[str, str] = {}
    for raw in _rows(source):
        prompt = _prompt(raw, turns)
        require(prompt.id not in seen, f"{raw.where}: id {prompt.id!r} was there before, at {seen.get(prompt.id)}")
        seen[prompt.id] = raw.where
        found.setdefault(prompt.task, []).append(prompt)
    require(bool(found), f"{source} has no prompts")
    unknown = [task for task in tasks if task not in found]
    require(not unknown, f"{source} has no task {', '.join(unknown)}; its tasks are {', '.join(found)}")
    return [prompt for task, prompts in found.items() if not tasks or task in tasks for prompt in prompts[:limit]]


def _rows(source: str) -> Iterator[RawRow]:
    path = Path(source).expanduser()
    if path.is_dir() and (files := sorted([*path.glob("*.jsonl"), *path.glob("*.jsonl.gz")])):
        for file in files:
            yield from _file_rows(file)
    elif path.is_file():
        yield from _file_rows(path)
    elif path.suffix in (".jsonl", ".gz"):  # no data set is called so, and the hub takes long to say it
        raise OptionError(f"cannot read {path}: no such file")
    else:
        for index, (row, split) in enumerate(hub_rows(source)):
            name = source.partition(":")[0]
            yield RawRow(row, f"{name}, row {index} of '{split}'", f"{name}/{index}", Path(name).name)


def _file_rows(path: Path) -> Iterator[RawRow]:
    stem = path.name.removesuffix(".gz").removesuffix(".jsonl")
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(cast("BinaryIO", file), start=1):
                if line.strip():
                    row = json.loads(line.decode("utf-8-sig"))
                    yield RawRow(row, f"{path}, line {number}", f"{stem}/{number}", stem)
    except UnicodeDecodeError as error:
        raise OptionError(f"{path}, line {number}: not UTF-8 (byte {error.start + 1} of the line)") from error
    except json.JSONDecodeError as error:
        raise OptionError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise OptionError(f"{path}: damaged gzip file after line {number} ({error})") from error
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror or error}") from error


def _prompt(raw: RawRow, most_turns: int) -> Prompt:
    row, where = raw.row, raw.where
    require(isinstance(row, dict), f"{where}: not a JSON object")
    turns = row.get("turns", [row["prompt"]] if "prompt" in row else None)
    require(
        isinstance(turns, list) and bool(turns) and all(isinstance(turn, str) and turn.strip() for turn in turns),
        f"{where}: 'turns' must be a list of texts, none of them empty (or 'prompt' such a text)",
    )
    task = row.get("group") or row.get("task") or raw.task
    require(isinstance(task, str), f"{where}: 'task' must be a text")
    require(task != OVERALL, f"{where}: a task must not be called '{OVERALL}', the results' name for all of them")
    return Prompt(str(row.get("id", raw.id)), task, tuple(turns[:most_turns]))


def batches(prompts: Iterable[Prompt], size: int) -> list[list[Prompt]]:
    """Groups of at most `size`, each of one task and one number of turns; together in the order of the prompts."""
    groups: list[list[Prompt]] = []
    open_groups: dict[tuple[str, int], list[Prompt]] = {}
    for prompt in prompts:
        kind = (prompt.task, len(prompt.turns))
        if kind not in open_groups or len(open_groups[kind]) == size:
            open_groups[kind] = []
            groups.append(open_groups[kind])
        open_groups[kind].append(prompt)
    return groups
