"""Files that are whole or absent, whatever happens while they are written."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from paceline.errors import DiskFull, ModelError, require


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
        ModelError: safetensors could not write; other errors of the system stay what they are.
    """
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
        raise
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to fill in place of `path`, where it appears once it is complete; of one that fails nothing stays.

    Raises:
        OptionError: there is something in `path`.
        DiskFull: there was no room.
    """
    free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    require(free, f"{path} is not empty: name a new folder")
    partial = path.absolute().with_name(f".{path.absolute().name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.replace(path)
    except Exception as error:
        if is_full(error):
            raise DiskFull(f"the disk of {path} is full") from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def at_home(path: str | os.PathLike[str]) -> Path:
    """The path, with `~` for the home folder; as it is where there is no such user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  (pathlib raises)
