"""Builds pure Python, or with PACELINE_PREBUILT=1 a wheel that has the native tier's library inside (`make wheel`).

The library is called through ctypes: such a wheel is for one platform, and for any Python.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("paceline", "targets", "native")
SOURCES = Path(__file__).parent / "src" / NATIVE


class BuildWithLibrary(build_py):
    """Compiles the library beside its sources, under the name that `paceline.targets.native.build` looks for."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # a checkout compiles what its sources are at the time
            return
        spec = importlib.util.spec_from_file_location("compiler", SOURCES / "compiler.py")
        compiler = importlib.util.module_from_spec(spec)  # alone: the package needs torch
        spec.loader.exec_module(compiler)
        found = compiler.find_compiler()
        if found is None:
            raise SystemExit("error: a wheel with the native tier needs a C++20 compiler with OpenMP, g++ or clang++")
        folder = Path(self.build_lib) / NATIVE
        for stale in folder.glob("*.so"):
            stale.unlink()
        try:
            compiler.compile_library(found, folder / f"{compiler.source_key()}.so", announce)
        except compiler.CompilationFailed as error:
            raise SystemExit(f"error: the native tier {error}") from error


class PlatformDistribution(Distribution):
    """Goes where a platform's packages go, as if it had extension modules: auditwheel wants shared libraries there."""

    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    """Tagged py3-none-PLATFORM."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def announce(title: str, jobs: int) -> Callable[[int], None]:
    return lambda done: print(f"{title}: {done} of {jobs}", flush=True)


if os.environ.get("PACELINE_PREBUILT") == "1":
    setup(distclass=PlatformDistribution, cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel})
else:
    setup()
