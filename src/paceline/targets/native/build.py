"""Compiles the C++ sources on first use, into the cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch  # before the library: it then shares torch's OpenMP threads instead of bringing its own
from filelock import FileLock

from paceline.errors import NativeUnavailable
from paceline.targets import store

SOURCES = ("gemm.cpp", "attention.cpp", "pass.cpp")
HEADERS = ("native.h", "team.h")
# No contraction: a product and a sum are fused where the source says so and nowhere else (see native.h).
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-psabi")
PORTABLE = "PACELINE_NATIVE_PORTABLE"  # set to 1: plain code for any machine of the architecture, no AVX2


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled library.

    Raises:
        NativeUnavailable: no C++20 compiler with OpenMP, or it failed.
    """
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), None)
    if compiler is None:
        raise NativeUnavailable(
            "the native tier needs a C++ compiler with OpenMP (g++ or clang++), and none is installed"
        )
    portable = os.environ.get(PORTABLE) == "1"
    flags = FLAGS if portable else (*FLAGS, "-march=native")
    folder = store.root() / "native"
    path = folder / f"{_key(compiler, flags)}.so"
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_suffix(".lock")):
                if not path.exists():  # else another process built it while we waited
                    _compile(compiler, flags, path)
        return _declare(ctypes.CDLL(str(path)))
    except OSError as error:
        raise NativeUnavailable(f"the native tier cannot be built or loaded: {error}") from error


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    """Of everything the library depends on: sources, flags, compiler, CPU, torch (whose OpenMP it uses)."""
    here = Path(__file__).parent
    parts = [compiler, *flags, _cpu(), torch.__version__]
    parts.append(subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout)
    parts += [(here / name).read_text() for name in (*SOURCES, *HEADERS)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _cpu() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.lower().startswith(("flags", "features")))
    except (OSError, StopIteration):
        return platform.machine() + platform.processor()


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    """All sources at once, one process each, then linked and renamed into place."""
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as work:
        objects = [f"{work}/{name}.o" for name in SOURCES]
        jobs = [
            subprocess.Popen([compiler, *flags, "-c", str(here / name), "-o", made], stderr=subprocess.PIPE, text=True)
            for name, made in zip(SOURCES, objects, strict=True)
        ]
        link = [compiler, "-shared", "-fopenmp", *objects, "-o", f"{work}/native.so"]
        errors = [job.communicate()[1] for job in jobs]
        if not any(job.returncode for job in jobs):
            done = subprocess.run(link, stderr=subprocess.PIPE, text=True)
            if done.returncode == 0:
                os.replace(f"{work}/native.so", path)
                return
            errors = [done.stderr]
        lines = [line for line in "\n".join(errors).splitlines() if "error" in line.lower()]
        reason = lines[0].strip() if lines else "no message"
        raise NativeUnavailable(f"the native tier could not be compiled with {compiler}: {reason}")


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    for name, result, *arguments in (
        ("paceline_packed_bytes", ctypes.c_size_t, pointer),
        ("paceline_pack", None, pointer, pointer, ctypes.c_int64, pointer, integer, pointer),
        ("paceline_workspace", ctypes.c_size_t, pointer, pointer),
        ("paceline_rows", ctypes.c_bool, pointer, pointer, integer, pointer),
        ("paceline_layers", None, pointer, pointer, integer, integer, pointer, pointer),
        ("paceline_head", None, pointer, pointer, integer, integer, pointer, pointer),
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
