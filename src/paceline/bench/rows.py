"""The rows of a suite as they were read: from JSONL and parquet files, from data sets, from SPEED-Bench."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from paceline.bench import speed_bench
from paceline.bench.columns import prompt_column, turns
from paceline.bench.hub import hub_rows
from paceline.errors import OptionError, require
from paceline.files import at_home, read_json

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


class RawRow(NamedTuple):
    """A row as it was read, and what it is called when it does not say."""

    row: Any
    where: str
    id: str
    task: str


def read_rows(source: str) -> Iterator[RawRow]:
    """The rows of a suite; see `suites.load_suite`. Raises OptionError for what cannot be read."""
    name, options = _parsed(source)
    if name != speed_bench.NAME:
        yield from _rows(name, options)
        return
    rows = list(_rows(*speed_bench.locate(options)))
    fetched = [raw for raw in rows if not speed_bench.unfetched(raw.row)]
    if "unfetched" not in options:
        speed_bench.demand_texts(len(rows) - len(fetched), len(rows))
    yield from fetched


def _parsed(source: str) -> tuple[str, dict[str, str]]:
    """What is before the first colon, and the `key=value`s after it; a path may have colons of its own."""
    if at_home(source).exists():
        return source, {}
    name, *pairs = source.split(":")
    return name, {key: value for key, _, value in (pair.partition("=") for pair in pairs)}


def _rows(name: str, options: Mapping[str, str]) -> Iterator[RawRow]:
    path = at_home(name)
    suite_files = sorted([*path.glob("*.jsonl"), *path.glob("*.jsonl.gz")]) if path.is_dir() else [path]
    if path.is_file() or (path.is_dir() and suite_files):
        bad = [key for key in options if key != "column"]
        require(not bad, f"suite {name}: {', '.join(bad)} is no option of files: theirs is column")
        for file in suite_files:
            yield from _file_rows(file, options.get("column"))
    elif path.name.endswith(SUFFIXES):  # no data set is called so, and the hub takes long to say it
        raise OptionError(f"cannot read {path}: no such file")
    else:
        for index, (row, split) in enumerate(hub_rows(name, options)):
            yield RawRow(row, f"{name}, row {index} of '{split}'", f"{name}/{index}", path.name)


def _file_rows(path: Path, column: str | None) -> Iterator[RawRow]:
    stem = path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".parquet")
    parquet = path.suffix == ".parquet"
    for number, row in _parquet(path) if parquet else _json_lines(path):
        where = f"{path}, {'row' if parquet else 'line'} {number}"
        yield RawRow(_with_turns(row, column, where), where, f"{stem}/{number}", stem)


def _with_turns(row: Any, column: str | None, where: str) -> Any:
    """The row, its prompt as `turns`; one that has them keeps them as they are, and what is no row stays so."""
    if not isinstance(row, dict) or (column is None and ("turns" in row or not row)):
        return row
    return row | {"turns": turns(row[prompt_column(row, row, column, where)])}


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(cast("BinaryIO", file), start=1):
                if line.strip():
                    yield number, read_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise OptionError(f"{path}, line {number}: not UTF-8 (byte {error.start + 1} of the line)") from error
    except json.JSONDecodeError as error:
        raise OptionError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})") from error
    except ValueError as error:
        raise OptionError(f"{path}, line {number}: not JSON that can be read ({error})") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise OptionError(f"{path}: damaged gzip file after line {number} ({error})") from error
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror or error}") from error


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise OptionError(f"{path}: parquet files need paceline's extra 'bench'") from error
    try:
        with ParquetFile(path) as file:
            rows = [row for batch in file.iter_batches() for row in batch.to_pylist()]
    except (ArrowException, OSError) as error:
        raise OptionError(f"cannot read {path}: {next(iter(str(error).splitlines()), '')}") from error
    yield from enumerate(rows)
