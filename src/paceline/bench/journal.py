"""The folder of a run: its settings, what has been measured so far, and the results."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from paceline.bench.methods import Generated
from paceline.errors import OptionError, first_line, require
from paceline.files import fits, read_json, whole

LOCK, CONFIG, RUNS, RESULTS, DIFFERENCES = ".lock", "config.json", "runs.jsonl", "results.jsonl", "differences.jsonl"
SAMPLES = "samples.jsonl"

Key = tuple[str, float, tuple[str, ...], int]


@dataclass(kw_only=True)
class Run(Generated):
    """One timed call: a method at a temperature, over one turn of a batch of conversations (`ids`, of one task)."""

    method: str
    temperature: float
    task: str
    ids: list[str]
    turn: int  # 0-based
    prompt_tokens: list[int]

    @property
    def key(self) -> Key:
        return self.method, self.temperature, tuple(self.ids), self.turn

    @classmethod
    def read(cls, line: str) -> Run:
        """Raises ValueError or TypeError for what no benchmark has written."""
        run = cls(**read_json(line))
        if not fits(run, cls) or not len(run.ids) == len(run.outputs) == len(run.prompt_tokens):
            raise ValueError("it is no call of a benchmark")
        return run


class Journal:
    """The files of a run, and its finished calls in memory. Made by `open_journal`."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.folder, self.config = folder, config
        self.runs: dict[Key, Run] = {run.key: run for run in _read_runs(folder / RUNS)}

    @property
    def complete(self) -> bool:
        return (self.folder / RESULTS).exists()

    def append(self, run: Run) -> None:
        """Record a finished call, so that a kill later on does not lose it."""
        path = self.folder / RUNS
        with _writing(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(run)) + "\n")
        self.runs[run.key] = run

    def settle(self, **facts: Any) -> None:
        """Add to the config what is the same for all calls, and is known only now.

        Raises:
            OptionError: the calls measured so far were made with another value.
        """
        if self.runs:
            known = {name: self.config[name] for name in facts if name in self.config}
            _check_same(self.folder, known, {name: facts[name] for name in known})
        self.note(**facts)

    def note(self, **facts: Any) -> None:
        """Add to the config what was measured before the first call, such as the noise."""
        self.config |= facts
        _write(self.folder / CONFIG, json.dumps(self.config, indent=1) + "\n")

    def write(self, name: str, rows: Iterable[Any]) -> None:
        """A JSONL file, whole or not at all."""
        _write(self.folder / name, "".join(json.dumps(row) + "\n" for row in rows))

    def read(self, name: str) -> list[Any]:
        """Its rows. Raises OptionError where they are damaged."""
        path = self.folder / name
        try:
            return [read_json(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except ValueError as error:
            raise OptionError(f"{path} is damaged: {first_line(error)}") from error


@contextmanager
def open_journal(folder: Path, settings: dict[str, Any], machine: dict[str, Any]) -> Iterator[Journal]:
    """The journal of `folder`, new or gone on with, locked against other processes. Of one that fails before
    anything was measured nothing stays.

    Raises:
        OptionError: when the folder cannot be used, is in use, is damaged, or holds a run with other settings or
            from another machine: its measurements could not stand in one table with new ones.
    """
    lock = FileLock(folder / LOCK, timeout=0)
    new = [place for place in (folder, *folder.parents) if not place.exists()]  # the deepest first
    begun = (folder / CONFIG).exists()
    try:
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
    except Timeout as error:
        raise OptionError(f"another process is measuring into {folder}") from error
    try:
        yield Journal(folder, _config(folder, settings, machine))
    except BaseException:
        if not begun and not any((folder / name).exists() for name in (RUNS, RESULTS)):
            _take_back(folder, new)
        raise
    finally:
        lock.release()


def _take_back(folder: Path, new: Sequence[Path]) -> None:
    with suppress(OSError):  # of folders in which others have put something
        for name in (CONFIG, LOCK):
            (folder / name).unlink(missing_ok=True)
        for place in new:
            place.rmdir()


def _config(folder: Path, settings: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
    path, runs = folder / CONFIG, folder / RUNS
    if path.exists():
        try:
            config: dict[str, Any] = read_json(path.read_text(encoding="utf-8"))
            before = config["settings"] | config["machine"]
        except (ValueError, KeyError, TypeError) as error:
            raise OptionError(f"{path} is not the config of a benchmark run: choose another folder") from error
        if (runs.exists() and runs.stat().st_size) or (folder / RESULTS).exists():
            _check_same(folder, before, settings | machine)
            return config  # else that run failed before it had measured anything
    else:
        require(not runs.exists(), f"{folder} has {RUNS} but no {CONFIG}: choose another folder")
    made = datetime.now(UTC).isoformat(timespec="seconds")
    config = {"settings": settings, "machine": machine, "date": made}
    _write(path, json.dumps(config, indent=1) + "\n")
    return config


def _check_same(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    differing = [
        f"{key} {_shown(before.get(key))}, not {_shown(now.get(key))}"
        for key in {**now, **before}
        if before.get(key) != now.get(key)
    ]
    require(not differing, f"{folder} holds a run with {'; '.join(differing[:3])}: choose another folder, or delete it")


def _read_runs(path: Path) -> Iterator[Run]:
    if not path.exists():
        return
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):  # the last line was being written when the process was killed
        os.truncate(path, end)
    for number, line in enumerate(data[:end].splitlines(), start=1):
        try:
            yield Run.read(line.decode())
        except (ValueError, TypeError) as error:
            raise OptionError(f"{path}, line {number} is damaged: delete the line to measure it again") from error


def _write(path: Path, text: str) -> None:
    with _writing(path), whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except Timeout:  # the lock's, an OSError too
        raise
    except OSError as error:
        raise OptionError(f"cannot write to {error.filename or path}: {error.strerror or error}") from error


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
