"""The cache of converted models: one folder a model, complete or absent.

`~/.cache/paceline` (or `$PACELINE_CACHE`) holds `models/<key>/`, whose `paceline.json` lists every file with its
size and SHA-256. A folder is built in a hidden sibling and renamed into place under a lock, so two processes share
one build and a kill half-way leaves nothing that looks finished. Checking costs milliseconds: all sizes, and the
hashes of small files and of those written to since (about 1 s a GB); `full` hashes all. A damaged folder is built
again.
"""

import atexit
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from paceline.errors import DiskFull, ModelError
from paceline.files import at_home, is_full

FORMAT = 2  # 1: of a GGUF file's ends of output only one was taken over
MANIFEST = "paceline.json"
_SMALL = 16 << 20  # bytes; tokenizer and configs are below, weights above
_LONGEST = 150  # bytes of a name that settings are put behind: file systems take 255

Build = Callable[[Path, Path | None], dict[str, Any]]

_aside: dict[Path, Path] = {}  # entries of a cache that cannot be written to, and what this process has made instead
_made: set[Path] = set()  # all of these, those too that another has replaced

log = logging.getLogger("paceline")


def root() -> Path:
    """The cache folder: `$PACELINE_CACHE`, else `~/.cache/paceline`."""
    return at_home(os.environ.get("PACELINE_CACHE") or "~/.cache/paceline").absolute()


def entry_name(location: str) -> str:
    """A model's folder or hub id as a file name; for a named model its entry in the cache, which pins the weights."""
    folder = Path(location)
    if folder.parent == root() / "models" or folder in _made:
        return folder.name
    if os.path.isdir(location):  # noqa: PTH112  (a hub id may be no path)
        # As seen from here it may be called as another one is from elsewhere: "." is any.
        location = str(folder.resolve() if ".." in folder.parts else folder.absolute())
    name = re.sub(r"[^\w.-]+", "--", location.strip("/"))
    if len(whole := os.fsencode(name)) > _LONGEST:
        name = f"{hashlib.sha256(whole).hexdigest()[:12]}--{whole[-_LONGEST:].decode(errors='ignore').lstrip('.-')}"
    return name


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def entry(key: str, build: Build, *, verify: bool = False, holding: str = "") -> Path:
    """The complete folder of `key`, built now if it is absent or damaged, or has no file whose name ends in `holding`.

    `build(work, replaced)` writes the files into the folder `work` and returns facts for the manifest; `replaced` is
    the folder about to be replaced, if any, for what can be saved from it. Where that cannot be replaced, because the
    cache can only be read, the folder is made for this process alone.
    """
    folder = root() / "models" / key
    if folder.is_dir() and fault(folder, full=verify, holding=holding) is None:
        return folder
    if folder.is_dir() and not os.access(folder.parent, os.W_OK):
        return _made_aside(folder, build, holding)
    with disk_errors(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{key}.lock", key):
            reason = fault(folder, full=verify, holding=holding) if folder.exists() else None
            if folder.exists() and reason is None:  # another process built it while we waited
                return folder
            if reason:
                log.warning("The cached model %s is unusable (%s); building it again.", folder, reason)
            _replace(folder, build)
    return folder


def fault(folder: Path, *, full: bool = False, holding: str = "") -> str | None:
    """Why the folder is not a complete entry of this version, or None if it is. Empty where nothing is wrong, but no
    file's name ends in `holding`.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT:
            return f"it has format {manifest['format']}, this version needs {FORMAT}"
        for name, facts in manifest["files"].items():
            found = (folder / name).stat()
            if found.st_size != facts["bytes"]:
                return f"{name} has {found.st_size} bytes instead of {facts['bytes']}"
            suspect = full or found.st_size <= _SMALL or found.st_mtime_ns != facts.get("mtime_ns")
            if suspect and sha256(folder / name) != facts["sha256"]:
                return f"{name} has changed"
        if not any(name.endswith(holding) for name in manifest["files"]):
            return ""
    except OSError as error:
        return f"{Path(error.filename or folder).name}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is not readable"
    return None


def need(folder: Path, size: int, what: str) -> None:
    """Raise `DiskFull` unless `size` bytes (and a little more) are free where `folder` is."""
    free = shutil.disk_usage(folder).free
    if free < size * 1.02 + (8 << 20):
        raise DiskFull(
            f"{what} needs {size / 1e6:.0f} MB in {root()}, where {free / 1e6:.0f} MB are free: "
            f"make room, or set PACELINE_CACHE to a folder on another disk"
        )


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn the system's errors while `folder` is written into `DiskFull` or `ModelError`."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        if is_full(error):
            raise DiskFull(f"the disk of {folder} is full: make room, or set PACELINE_CACHE") from error
        if isinstance(error, OSError):
            place = error.filename or folder
            raise ModelError(
                f"cannot use {place} ({error.strerror}): set PACELINE_CACHE to a folder you can write to"
            ) from error
        raise


def check_writable(folder: Path) -> None:
    """Raises ModelError where nothing can be written into `folder`, which is made."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def _replace(folder: Path, build: Build) -> None:
    """Build `folder` anew; the caller holds its lock, so temporary folders of this key are nobody else's."""
    work, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    try:
        for leftover in (work, old):  # of a process that was killed
            _remove(leftover)
        work.mkdir()
        facts = build(work, folder if folder.exists() else None)
        _seal(work, facts)
        if folder.exists():
            folder.replace(old)
        work.replace(folder)
        _sync(folder.parent)
    finally:
        for leftover in (work, old):
            _remove(leftover)


def _made_aside(folder: Path, build: Build, holding: str) -> Path:
    """Build into a folder that goes when the process does; anew where it has no file whose name ends in `holding`."""
    if folder not in _aside or not any(_aside[folder].glob(f"*{holding}")):
        log.warning("%s cannot be written to: preparing %s for this run alone.", folder.parent, folder.name)
        temporary = Path(tempfile.mkdtemp(prefix="paceline-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        work = temporary / folder.name
        with disk_errors(temporary):
            work.mkdir()
            build(work, folder)
        _aside[folder] = work
        _made.add(work)
    return _aside[folder]


def _remove(folder: Path) -> None:
    if folder.is_dir():
        shutil.rmtree(folder)


def _seal(folder: Path, facts: dict[str, Any]) -> None:
    """Write the manifest of all files below `folder`, and push everything to the disk."""
    files = {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "mtime_ns": path.stat().st_mtime_ns,
            "sha256": sha256(path),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, **facts, "files": files}, indent=1) + "\n")
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    if os.name != "posix":  # elsewhere neither folders nor files open for reading can be synced
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(path: Path, key: str) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.warning("Waiting for another process that is preparing %s.", key)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
