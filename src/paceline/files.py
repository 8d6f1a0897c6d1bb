"""Files that are whole or absent, whatever happens while they are written; and JSON that may be damaged."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from safetensors import SafetensorError

from paceline.errors import DiskFull, ModelError, require

#: Single values by annotation, and what they are in JSON: a float may be written as a whole number.
SINGLE: dict[Any, set[type]] = {bool: {bool}, int: {int}, float: {int, float}, str: {str}, NoneType: {NoneType}}


def is_full(error: BaseException) -> bool:
    """Whether the disk was full; safetensors says so only in its text."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)


@contextmanager
def whole(path: Path, then: str = "give the command again") -> Iterator[Path]:
    """A path to write to in place of `path`, where the file appears once it is complete; of one that fails nothing
    stays.

    Args:
        then: what helps after room was made, for the message.

    Raises:
        DiskFull: there was no room.
        ModelError: safetensors could not write; other errors of the system stay what they are, and name `path`.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    new = [folder for folder in path.parents if not folder.exists()]  # the deepest first
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")  # one that a kill left is written over
    try:
        partial.unlink(missing_ok=True)
        partial.touch()
        mode = partial.stat().st_mode
        yield partial
        partial.chmod(mode)  # safetensors keeps its files from all other users
        partial.replace(path)
    except (OSError, SafetensorError, RuntimeError) as error:
        if is_full(error):
            raise DiskFull(f"the disk of {path.parent} is full: make room and {then}") from error
        if isinstance(error, SafetensorError):
            raise ModelError(f"cannot write {path}: {' '.join(str(error).split())}") from error
        if isinstance(error, OSError) and error.filename is not None and Path(error.filename) == partial:
            error.filename = str(path)  # nobody has heard of the other
        raise
    finally:
        with suppress(OSError):  # what failed is told already
            partial.unlink()
        _remove_new(new, path)


def _remove_new(folders: Sequence[Path], made_for: Path) -> None:
    """Folders that were made for a path, the deepest first, unless it is there now."""
    with suppress(OSError):  # others may have put something there
        for folder in () if made_for.exists() else folders:
            folder.rmdir()


def require_new_folder(path: Path) -> None:
    """Raises OptionError where `whole_folder` would, for those who have long to work before they write."""
    free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    require(free, f"{path} is not empty: name a new folder")
    used = path.exists() and (path.samefile(os.curdir) or path.is_mount())
    require(not used, f"{path} is the current folder, or a disk's: name a new one")


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to fill in place of `path`, where it appears once it is complete; of one that fails nothing stays.

    Raises:
        OptionError: there is something in `path`, or no folder can take its place.
        DiskFull: there was no room.
    """
    require_new_folder(path)
    home = path.resolve()  # a link stays, and its folder is filled
    new = [folder for folder in home.parents if not folder.exists()]  # the deepest first
    partial = home.with_name(f".{home.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.replace(home)
    except Exception as error:
        if is_full(error):
            raise DiskFull(f"the disk of {path} is full") from error
        if isinstance(error, OSError) and error.filename is not None and Path(error.filename) == partial:
            error.filename = str(path)  # nobody has heard of the other
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        _remove_new(new, home)


def share_weights(folder: Path) -> None:
    """Safetensors keeps its files from all other users: give them the rights of the `config.json` beside them."""
    mode = (folder / "config.json").stat().st_mode
    for weights in folder.glob("*.safetensors"):
        weights.chmod(mode)


def read_json(text: str) -> Any:
    """What a JSON text says.

    Raises:
        ValueError: it is not JSON, or more than Python reads: nested too deeply, or a number with too many digits.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        raise ValueError("it has a number with too many digits") from error


def fits(value: Any, hint: Any) -> bool:
    """Whether what JSON says is what an annotation does; lists stand for tuples, too."""
    if hint is Any or hint in SINGLE:
        return hint is Any or type(value) in SINGLE[hint]
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is UnionType:
        return any(fits(value, one) for one in inner)
    if isinstance(kind, type) and is_dataclass(kind):
        return isinstance(value, kind) and all(
            fits(getattr(value, name), one) for name, one in get_type_hints(kind).items()
        )
    if kind is dict:
        return isinstance(value, dict) and all(fits(one, inner[1]) for one in value.values())
    if not isinstance(value, list | tuple):
        return False
    if issubclass(kind, tuple):
        each = inner or tuple(get_type_hints(kind).values())
        return len(value) == len(each) and all(map(fits, value, each))
    assert kind in (list, Sequence)
    if inner[0] in SINGLE:
        return {*map(type, value)} <= SINGLE[inner[0]]
    return all(fits(one, inner[0]) for one in value)


def at_home(path: str | os.PathLike[str]) -> Path:
    """The path, with `~` for the home folder; as it is where there is no such user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  (pathlib raises)
