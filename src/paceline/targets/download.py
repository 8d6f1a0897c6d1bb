"""Fetching one wheel from the package index, checked by its SHA-256."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import DiskFull, DownloadError, IntegrityError
from paceline.targets.store import sha256

PYPI = "https://pypi.org"
_OFFLINE = re.compile(  # what pip prints when nobody answers
    r"Failed to establish|name resolution|NameResolution|unreachable|refused|timed out|ProxyError|Connection aborted"
)


@dataclass(frozen=True)
class Wheel:
    """A pinned wheel of the package index. `size` is in bytes, for progress and the check of free space."""

    distribution: str
    version: str
    sha256: str
    size: int

    def __str__(self) -> str:
        return f"{self.distribution}=={self.version}"


def fetch(wheel: Wheel, into: Path, seen: Callable[[int], None]) -> Path:
    """Download `wheel` without its dependencies into the folder `into`; `seen` gets the bytes so far.

    pip does it, so that the user's own index settings apply; without pip, the JSON API of PyPI.
    Raises `DownloadError`, `DiskFull`, `IntegrityError`.
    """
    if importlib.util.find_spec("pip"):
        _pip(wheel, into, seen)
    else:
        _json_api(wheel, into, seen)
    path = next(into.glob("*.whl"))
    digest = sha256(path)
    if digest != wheel.sha256:
        path.unlink()
        raise IntegrityError(
            f"the downloaded {wheel} has SHA-256 {digest[:12]}…, expected {wheel.sha256[:12]}…: "
            f"it was thrown away; check the package index that pip uses"
        )
    return path


def _pip(wheel: Wheel, into: Path, seen: Callable[[int], None]) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--retries=2", f"--dest={into}", str(wheel)]
    errors = into / "pip.log"
    # pip downloads into TMPDIR: below `into` we can watch it grow, and it is the disk whose room was checked
    with errors.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(into)})
        try:
            while process.poll() is None:
                seen(_size(into))
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
    text = errors.read_text(errors="replace")
    errors.unlink()
    if process.returncode:
        raise _explain(wheel, text)


def _size(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):  # passes over folders that pip removes meanwhile, unlike Path.rglob
        for name in files:
            with suppress(FileNotFoundError):  # pip has just moved it
                total += Path(place, name).stat().st_size
    return total


def _explain(wheel: Wheel, text: str) -> Exception:
    if "No space left" in text:
        return DiskFull(f"the disk is full: could not download {wheel}")
    if _OFFLINE.search(text):
        return DownloadError(f"no network: the package index cannot be reached to download {wheel}")
    last = [line for line in text.splitlines() if line.startswith("ERROR")] or text.splitlines()[-1:] or ["no reason"]
    return DownloadError(f"pip could not download {wheel}: {last[-1].removeprefix('ERROR: ')}")


def _json_api(wheel: Wheel, into: Path, seen: Callable[[int], None]) -> None:
    try:
        with urllib.request.urlopen(f"{PYPI}/pypi/{wheel.distribution}/{wheel.version}/json", timeout=30) as reply:
            files = json.load(reply)["urls"]
        found = next((file for file in files if file["digests"]["sha256"] == wheel.sha256), None)
        if found is None:
            raise IntegrityError(f"the package index has no file of {wheel} with SHA-256 {wheel.sha256[:12]}…")
        with (
            urllib.request.urlopen(found["url"], timeout=30) as reply,
            (into / Path(found["filename"]).name).open("wb") as file,
        ):
            while chunk := reply.read(1 << 20):
                file.write(chunk)
                seen(file.tell())
    except urllib.error.HTTPError as error:
        error.close()  # it is the reply as well
        raise DownloadError(f"the package index has no {wheel} (HTTP {error.code})") from error
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise DownloadError(f"no network: the package index cannot be reached to download {wheel}") from error
