"""Compiles the C++ sources on first use, into the cache: once for each instruction set, into one library.

A compilation that failed is remembered beside where the library would be, and not tried again.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch  # before the library: it then shares torch's OpenMP threads instead of bringing its own
from filelock import FileLock

from paceline.errors import NativeUnavailable, OptionError
from paceline.files import whole
from paceline.targets import store
from paceline.targets.progress import Stage, bars

# Compiled for every instruction set, those that take longest last; and once for any machine.
KERNELS = ("roofline.cpp", "pass.cpp", "gemm.cpp", "attention.cpp", "bfloat16.cpp", "formats.cpp", "formats_k.cpp")
COMMON = "library.cpp"
HEADERS = (
    *("native.h", "kernels.h", "vectors.h", "team.h", "attention.h", "bfloat16.h"),
    *("formats.h", "kernel.h", "tiles.h", "storage.h", "storage_k.h", "digits.h"),
)
# No contraction: a product and a sum are fused where the source says so and nowhere else (see native.h).
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-psabi")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, *(f"-mavx512{part}" for part in ("f", "dq", "bw", "vl", "bf16")))
# By architecture, the slowest first; the library takes the last that the machine has.
INSTRUCTION_SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {"portable": (), "avx2": _AVX2, "avx512": _AVX512},
    "aarch64": {"neon": ()},
}
FORCED = "PACELINE_ISA"  # environment variable: an instruction set to run on instead


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled library.

    Raises:
        NativeUnavailable: no C++20 compiler with OpenMP, or it failed.
        OptionError: the instruction set that the environment names is not there.
    """
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), None)
    if compiler is None:
        raise NativeUnavailable(
            "the native tier needs a C++ compiler with OpenMP (g++ or clang++), and none is installed"
        )
    path = folder() / f"{_key(compiler)}.so"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_suffix(".lock")):
                if not path.exists():  # else another process built it while we waited
                    _compile_once(compiler, path)
        loaded = _declare(ctypes.CDLL(str(path)))
    except OSError as error:
        raise NativeUnavailable(f"the native tier cannot be built or loaded: {error}") from error
    if name := os.environ.get(FORCED):
        _choose(loaded, name)
    return loaded


def folder() -> Path:
    """Where the library is kept."""
    return store.root() / "native"


def instruction_set() -> str:
    """The one that passes run on."""
    name: bytes = library().paceline_chosen_isa()
    return name.decode()


def choose(name: str) -> None:
    """Run all passes of this process on an instruction set of `INSTRUCTION_SETS`, for tests and measurements: results
    are the same on each.

    Raises:
        OptionError: the library or the machine has none of this name.
    """
    _choose(library(), name)


def runnable() -> list[str]:
    """The instruction sets that this machine has, the slowest first."""
    return _runnable(library())


def _choose(loaded: ctypes.CDLL, name: str) -> None:
    if not loaded.paceline_choose_isa(name.encode()):
        raise OptionError(
            f"no instruction set '{name}' ({FORCED}) on this machine; there are {', '.join(_runnable(loaded))}"
        )


def _runnable(loaded: ctypes.CDLL) -> list[str]:
    return [name for name in _instruction_sets() if loaded.paceline_has_isa(name.encode())]


def _instruction_sets() -> dict[str, tuple[str, ...]]:
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine())
    return INSTRUCTION_SETS.get(machine, {"portable": ()})


def _key(compiler: str) -> str:
    """Of everything the library depends on: sources, flags, compiler, torch (whose OpenMP it uses). Not the processor:
    the library has code for each, and chooses when it is loaded.
    """
    here = Path(__file__).parent
    parts = [compiler, *FLAGS, platform.machine(), str(_instruction_sets()), torch.__version__]
    parts.append(subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout)
    parts += [(here / name).read_text() for name in (*KERNELS, COMMON, *HEADERS)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _compile_once(compiler: str, path: Path) -> None:
    """`_compile`, unless it failed before: nothing that it depends on has changed since."""
    failed = path.with_suffix(".failed")
    if failed.exists():
        reason = failed.read_text(encoding="utf-8")
        raise NativeUnavailable(f"{reason} (remembered: delete {failed} to try again)")
    try:
        with bars(sys.stderr.isatty()) as stage:
            _compile(compiler, path, stage)
    except NativeUnavailable as error:
        with whole(failed) as partial:
            partial.write_text(str(error), encoding="utf-8")
        raise


def _compile(compiler: str, path: Path, stage: Stage) -> None:
    """A process for each source and instruction set, as many at a time as there are cores; then linked and renamed
    into place.
    """
    sets = _instruction_sets()
    listed = "".join(f"ISA({name})" for name in sets)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as work:
        # The linker keeps the first copy of an inline function of the standard library: it must run anywhere.
        commands = {f"{work}/library.o": _command(compiler, COMMON, f"-DPACELINE_ISAS={listed}")}
        for name, flags in sets.items():
            for source in KERNELS:
                commands[f"{work}/{source}.{name}.o"] = _command(compiler, source, *flags, f"-DPACELINE_ISA={name}")
        jobs = [[*command, "-o", made] for made, command in reversed(commands.items())]  # the last set takes longest
        failed, done = "", stage("compiling the native tier, once", len(jobs))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for count, errors in enumerate(pool.map(_errors, jobs), start=1):
                failed += errors
                done(count)
        failed = failed or _errors([compiler, "-shared", "-fopenmp", *commands, "-o", f"{work}/native.so"])
        if failed:
            lines = [line for line in failed.splitlines() if "error" in line.lower()]
            reason = lines[0].strip() if lines else "no message"
            raise NativeUnavailable(
                f"the native tier could not be compiled with {compiler}, which needs C++20 and OpenMP (g++ has both): "
                f"{reason}"
            )
        Path(work, "native.so").replace(path)


def _command(compiler: str, source: str, *flags: str) -> list[str]:
    return [compiler, *FLAGS, *flags, "-c", str(Path(__file__).parent / source)]


def _errors(command: list[str]) -> str:
    """What a command that failed has said. Raises OSError for what may be otherwise next time."""
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode < 0:
        raise OSError(f"{command[0]} was ended by signal {-done.returncode}: is there enough memory?")
    if "No space left" in done.stderr:
        raise OSError("the disk is full")
    return (done.stderr or "error: no message\n") if done.returncode else ""


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, integer, text = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
    for name, result, *arguments in (
        ("paceline_has_isa", ctypes.c_bool, text),
        ("paceline_choose_isa", ctypes.c_bool, text),
        ("paceline_chosen_isa", text),
        ("paceline_packed_bytes", ctypes.c_size_t, pointer),
        ("paceline_pack", None, pointer, pointer, ctypes.c_int64, pointer, integer, pointer),
        ("paceline_workspace", ctypes.c_size_t, pointer, pointer),
        ("paceline_rows", ctypes.c_bool, pointer, pointer, integer, pointer),
        ("paceline_layers", None, pointer, pointer, integer, integer, pointer, pointer),
        ("paceline_head", None, pointer, pointer, integer, integer, pointer, pointer),
        ("paceline_peak", ctypes.c_double, integer, ctypes.c_bool),
        ("paceline_bandwidth", ctypes.c_double, pointer, ctypes.c_int64, integer),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def available() -> bool:
    """Whether the native tier can be used here; builds it if need be."""
    try:
        library()
    except NativeUnavailable:
        return False
    return True
