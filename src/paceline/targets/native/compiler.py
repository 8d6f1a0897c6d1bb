"""The C++ sources made into one library: what is compiled for which instruction set, and how.

Only Python's own modules: `setup.py` compiles with it where nothing is installed yet.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

Stage = Callable[[str, int], Callable[[int], object]]

SOURCES = Path(__file__).parent
# Compiled for every instruction set, those that take longest last; and once for any machine. Those in one row are
# compiled together: each would read the compiler's own headers anew, which takes long.
KERNELS = (
    ("gemm.cpp", "attention.cpp", "amx.cpp", "amx_blocks.cpp", "bfloat16.cpp"),
    ("roofline.cpp", "pass.cpp", "experts.cpp", "rows.cpp", "likeliest.cpp", "guide.cpp"),
    ("int8.cpp", "int8_k.cpp"),
    ("formats.cpp",),
    ("formats_k.cpp",),
)
COMMON = ("library.cpp", "span.cpp", "ngrams.cpp", "search.cpp")
HEADERS = (
    *("native.h", "span.h", "kernels.h", "vectors.h", "team.h", "attention.h", "activations.h", "bfloat16.h"),
    *("formats.h", "kernel.h", "tiles.h", "storage.h", "storage_k.h", "digits.h", "ngrams.h", "guide.h"),
    *("amx.h", "amx_tiles.h", "int8.h", "int8_kernel.h"),
)
# No contraction: a product and a sum are fused where the source says so and nowhere else (see native.h).
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-psabi")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
# Products of bfloat16 stand in code of their own, which runs only where the processor has them (native.h).
_AVX512 = (*_AVX2, *(f"-mavx512{part}" for part in ("f", "dq", "bw", "vl", "bf16")))
# By architecture, the slowest first; the library takes the last that the machine has.
INSTRUCTION_SETS: dict[str, dict[str, tuple[str, ...]]] = {
    # The first is for tests; the last are AVX-512 processors of AMD's, which other operations suit.
    "x86_64": {"portable": ("-O1",), "avx2": _AVX2, "avx512": _AVX512, "zen": (*_AVX512, "-DPACELINE_ZEN")},
    "aarch64": {"neon": ()},
}
ALL = "all"
# What compilers say where memory or room was missing, which may be there next time.
NO_MEMORY = (
    "Killed signal terminated program",
    "out of memory",
    "virtual memory exhausted",
    "Cannot allocate memory",
    "Resource temporarily unavailable",
)
NO_ROOM = ("No space left", "Disk quota exceeded")
# What a processor must have: that which library.cpp asks it for, as compilers' macros for it begin.
_FEATURES: dict[str, tuple[str, ...]] = {"portable": (), "avx2": ("AVX2__", "FMA__", "F16C__")}
_FEATURES["avx512"] = (*_FEATURES["avx2"], "AVX512F__", "AVX512DQ__", "AVX512BW__", "AVX512VL__")
_FEATURES["zen"] = (*_FEATURES["avx512"], "AVX512VNNI__", "znver")


class CompilationFailed(Exception):
    """The compiler refused the sources; the message is its first error, in one line."""


def find_compiler() -> str | None:
    """What `CXX` names, else the first of the usual names that is installed."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), None)


def instruction_sets() -> dict[str, tuple[str, ...]]:
    """Those that the library has code for on this architecture, and the compiler's flags for each."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine())
    return INSTRUCTION_SETS.get(machine, {"portable": ()})


def needed_sets(compiler: str, forced: str = "") -> list[str]:
    """Those that a library for this machine alone is made of: the fastest that it has.

    Args:
        forced: one to take instead; or `ALL`.
    """
    sets, here = list(instruction_sets()), machine_sets(compiler)
    if forced == ALL or not here:
        return sets
    chosen = forced if forced in sets else here[-1]
    # Without products of bytes, AVX-512's code calls AVX2's for them.
    return ["avx2", "avx512"] if chosen == "avx512" and "__AVX512VNNI__" not in _features(compiler) else [chosen]


def machine_sets(compiler: str) -> list[str]:
    """Those that this machine has, the slowest first; none where the compiler does not tell, or there is no choice."""
    sets = list(instruction_sets())
    here = _features(compiler) if len(sets) > 1 else ""
    return [name for name in sets if all(f"__{part}" in here for part in _FEATURES[name])] if here else []


def _features(compiler: str) -> str:
    """What the compiler defines for the processor it runs on; "" where it does not know, or the system's linker wants
    all that the code could call.
    """
    if platform.system() != "Linux":
        return ""
    command = [compiler, "-march=native", "-E", "-dM", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, text=True).stdout


def source_key() -> str:
    """Of all that the library is made of. Not of the processor: it has code for each, and chooses when it is loaded."""
    parts = [*FLAGS, platform.machine(), str(instruction_sets())]
    parts += [(SOURCES / name).read_text() for name in (*chain(*KERNELS), *COMMON, *HEADERS)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def compile_library(compiler: str, path: Path, stage: Stage, names: Collection[str] | None = None) -> None:
    """A process for each row of sources and instruction set, as many at a time as there are cores; then linked and
    renamed into place.

    Args:
        stage: shows how far it is, given a title and the number of jobs; see `paceline.targets.progress`.
        names: the instruction sets that it has code for; None: all.

    Raises:
        CompilationFailed: the compiler will fail the next time as well.
        OSError: it may not.
    """
    sets = {name: flags for name, flags in instruction_sets().items() if names is None or name in names}
    listed = "".join(f"ISA({name})" for name in sets)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as work:
        # The linker keeps the first copy of an inline function of the standard library: it must run anywhere.
        together = {Path(work, f"with-{row[0]}"): row for row in (COMMON, *KERNELS)}
        for source, row in together.items():
            source.write_text("".join(f'#include "{name}"\n' for name in row), encoding="utf-8")
        common, *kernels = together
        commands = {f"{common}.o": _command(compiler, common, f"-DPACELINE_ISAS={listed}")}
        for name, flags in sets.items():
            for source in kernels:
                commands[f"{source}.{name}.o"] = _command(compiler, source, *flags, f"-DPACELINE_ISA={name}")
        jobs = [[*command, "-o", made] for made, command in reversed(commands.items())]  # the last set takes longest
        failed, done = "", stage("compiling the native tier, once", len(jobs))
        with ThreadPoolExecutor(_cores()) as pool:
            for count, errors in enumerate(pool.map(_errors, jobs), start=1):
                failed += errors
                done(count)
        made = Path(work, "native.so")
        failed = failed or _errors([compiler, "-shared", "-fopenmp", *commands, "-o", str(made)])
        if not failed and not made.is_file():
            failed = "error: it made no library, and did not say why"
        if failed:
            lines = [line for line in failed.splitlines() if "error" in line.lower()]
            reason = lines[0].strip() if lines else "no message"
            raise CompilationFailed(
                f"could not be compiled with {compiler}, which needs C++20 and OpenMP "
                f"(g++ has both from version 11 on): {reason}"
            )
        made.replace(path)


def _command(compiler: str, source: Path, *flags: str) -> list[str]:
    return [compiler, *FLAGS, *flags, f"-I{SOURCES}", "-c", str(source)]


def _cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _errors(command: list[str]) -> str:
    """What a command that failed has said. Raises OSError for what may be otherwise next time."""
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode < 0 or (done.returncode and any(words in done.stderr for words in NO_MEMORY)):
        raise OSError(f"{command[0]} was ended before it was done: is there enough memory?")
    if any(words in done.stderr for words in NO_ROOM):
        raise OSError("the disk is full")
    return (done.stderr or "error: no message\n") if done.returncode else ""
