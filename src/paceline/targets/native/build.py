"""The compiled library: a wheel's own, else compiled on first use, into the cache.

A compilation that failed is remembered beside where the library would be, and not tried again.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch  # before the library: it then shares torch's OpenMP threads instead of bringing its own
from filelock import FileLock

from paceline.errors import NativeUnavailable, OptionError
from paceline.files import whole
from paceline.targets import store
from paceline.targets.native.compiler import (
    ALL,
    SOURCES,
    CompilationFailed,
    compile_library,
    find_compiler,
    instruction_sets,
    machine_sets,
    needed_sets,
    source_key,
)
from paceline.targets.progress import bars

_ELF = struct.Struct("40x Q 10x H H 2x")  # of a header: where the table of sections is, sizes of an entry, entries
#: Environment variable: an instruction set to run on instead of the fastest; "all": a library that is compiled here has
#: code for each, as a wheel's has.
FORCED = "PACELINE_ISA"
TILES = "amx"  #: AVX-512's code with AMX's products of bfloat16


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled library.

    Raises:
        NativeUnavailable: this is no wheel with a library, and there is no C++20 compiler with OpenMP, or it failed.
        OptionError: the instruction set that the environment names is not there.
    """
    loaded = _packaged() or _compiled()
    if (name := _forced()) not in ("", ALL):
        _choose(loaded, name)
    return loaded


def _forced() -> str:
    return os.environ.get(FORCED, "")


def _packaged() -> ctypes.CDLL | None:
    """That of the wheel, if there is one and it was made of just these sources."""
    path = packaged_folder() / f"{source_key()}.so"
    try:
        return _declare(ctypes.CDLL(str(path))) if _whole(path) else None
    except OSError:  # made for another system: perhaps there is a compiler
        return None


def _compiled() -> ctypes.CDLL:
    compiler = find_compiler()
    if compiler is None:
        raise NativeUnavailable(
            "the native tier needs a C++ compiler with OpenMP (g++ or clang++), and none is installed"
        )
    forced, here = _forced(), machine_sets(compiler) or list(instruction_sets())
    if forced not in ("", ALL) and {TILES: "avx512"}.get(forced, forced) not in here:  # before half a minute's work
        raise _no_set(forced, here)
    sets = needed_sets(compiler, forced)
    path = _path(compiler, sets)
    bad = None  # when one was written that cannot be loaded: it is damaged, or was made for another machine
    try:
        while True:
            if build := bad is not None or not _whole(path):
                _build(compiler, path, sets, bad)
            try:
                return _declare(ctypes.CDLL(str(path)))
            except OSError as error:
                if build:
                    raise _remembered(path, f"the native tier was built and cannot be loaded: {error}") from error
                bad = path.stat().st_mtime_ns
    except OSError as error:
        raise NativeUnavailable(f"the native tier cannot be built: {error}") from error


def _build(compiler: str, path: Path, sets: Sequence[str], bad: int | None) -> None:
    """Compile the library, unless another process has while we waited.

    Args:
        bad: when the library was written that cannot be loaded; None: there is none, or none that is whole.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not _whole(path) or path.stat().st_mtime_ns == bad:
            _compile_once(compiler, path, sets)


def _whole(path: Path) -> bool:
    """Whether the library is there, to its end: the system loads one that was cut short, and ends the process then.

    Of ELF files the end is where the table of sections ends; other systems' are not looked into.
    """
    try:
        with path.open("rb") as file:
            head, size = file.read(_ELF.size), path.stat().st_size
    except OSError:
        return False
    if len(head) < _ELF.size or not head.startswith(b"\x7fELF\x02"):
        return sys.platform != "linux"
    table, entry, count = _ELF.unpack(head)
    return bool(size >= table + entry * count)


def packaged_folder() -> Path:
    """Where a wheel has its library."""
    return SOURCES


def folder() -> Path:
    """Where a library that was compiled here is kept."""
    return store.root() / "native"


def instruction_set() -> str:
    """The one that passes run on."""
    name: bytes = library().paceline_chosen_isa()
    return name.decode()


def choose(name: str) -> None:
    """Run all passes of this process on one that is `runnable`, for tests and measurements. Results are the same on
    each, but for bfloat16's on `TILES`.

    Raises:
        OptionError: the library or the machine has none of this name.
    """
    _choose(library(), name)


def runnable() -> list[str]:
    """The instruction sets that this machine has, the slowest first."""
    return _runnable(library())


def _choose(loaded: ctypes.CDLL, name: str) -> None:
    if not loaded.paceline_choose_isa(name.encode()):
        raise _no_set(name, _runnable(loaded))


def _no_set(name: str, there: Sequence[str]) -> OptionError:
    listed = ", ".join(there) or "none"
    return OptionError(f"no instruction set '{name}' ({FORCED}) on this machine; there are {listed}")


def _runnable(loaded: ctypes.CDLL) -> list[str]:
    return [name for name in (*instruction_sets(), TILES) if loaded.paceline_has_isa(name.encode())]


def _path(compiler: str, sets: Sequence[str]) -> Path:
    """Of a library compiled here."""
    return folder() / f"{_key(compiler, sets)}.so"


def _key(compiler: str, sets: Sequence[str]) -> str:
    """Of all that a library compiled here depends on: torch as well, whose OpenMP it uses."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    parts = [source_key(), *sets, compiler, version, torch.__version__]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _compile_once(compiler: str, path: Path, sets: Sequence[str]) -> None:
    """Compile, unless it failed before: nothing that it depends on has changed since."""
    failed = path.with_suffix(".failed")
    if failed.exists():
        reason = failed.read_text(encoding="utf-8")
        raise NativeUnavailable(f"{reason} (remembered: delete {failed} to try again)")
    try:
        with bars(sys.stderr.isatty()) as stage:
            compile_library(compiler, path, stage, sets)
    except CompilationFailed as error:
        raise _remembered(path, f"the native tier {error}") from error


def _remembered(path: Path, reason: str) -> NativeUnavailable:
    with whole(path.with_suffix(".failed")) as partial:
        partial.write_text(reason, encoding="utf-8")
    return NativeUnavailable(reason)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, integer, text = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
    long, double = ctypes.c_int64, ctypes.c_double
    for name, result, *arguments in (
        ("paceline_has_isa", ctypes.c_bool, text),
        ("paceline_choose_isa", ctypes.c_bool, text),
        ("paceline_chosen_isa", text),
        ("paceline_packed_bytes", ctypes.c_size_t, pointer),
        ("paceline_pack", ctypes.c_bool, pointer, pointer, long, pointer, integer, pointer),
        ("paceline_rows", ctypes.c_bool, pointer, pointer, integer, pointer),
        ("paceline_pass", integer, pointer, pointer),
        ("paceline_head", integer, pointer, pointer, integer, integer, pointer),
        ("paceline_lengths", None, pointer, pointer),
        ("paceline_judge", None, pointer, integer, pointer, pointer, pointer),
        ("paceline_draw", integer, pointer, integer, ctypes.c_float, double),
        ("paceline_peak", double, integer, integer),
        ("paceline_bandwidth", double, pointer, long, integer),
        ("paceline_ngrams_learn", None, pointer, pointer, long, long, integer, integer, double),
        ("paceline_ngrams_rebuild", None, pointer, pointer, double, double),
        ("paceline_guide_floats", ctypes.c_size_t, integer, integer, integer),
        ("paceline_guide_rows", None, pointer, long, integer, integer, pointer, pointer),
        ("paceline_ngrams_grow", integer, pointer, pointer, pointer, pointer, pointer, pointer, pointer),
        ("paceline_ngrams_follow_up", None, pointer, pointer, long, long, integer, pointer, pointer, pointer),
        (
            "paceline_ngrams_follow",
            None,
            pointer,
            pointer,
            pointer,
            long,
            long,
            pointer,
            pointer,
            pointer,
            pointer,
            pointer,
        ),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def possible() -> bool:
    """Whether there is a library of a wheel, or a compiler: nothing is built or loaded for that."""
    return _whole(packaged_folder() / f"{source_key()}.so") or find_compiler() is not None


def built() -> bool:
    """Whether the library can be used without a first build: it is in the cache, or in the wheel."""
    there = _whole(packaged_folder() / f"{source_key()}.so")
    if not there and (compiler := find_compiler()):
        there = _whole(_path(compiler, needed_sets(compiler, _forced())))
    return there and available()


def available() -> bool:
    """Whether the native tier can be used here; builds it if need be."""
    try:
        library()
    except NativeUnavailable:
        return False
    return True
