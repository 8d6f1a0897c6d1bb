"""The program, run inside the test's process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from paceline.cli import main


class Result(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], cache_dir: Path) -> Run:
    """`run("generate", "hello", "-n", 3)`: exit code, standard output and standard error."""

    def run(*words: object) -> Result:
        capsys.readouterr()
        code = main([str(word) for word in words])
        return Result(code, *capsys.readouterr())

    return run
