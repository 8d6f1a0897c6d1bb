"""`benchmarks/auto.sh`: every method that it measures is one, and each part runs on both tiers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from paceline.bench.methods import check_method

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "auto.sh"
# Stands for Python: writes its arguments down, one a line.
STAND_IN = '#!/bin/sh\nprintf "%s\\n" "$@" "" >> "$ASKED"\n'


def run(tmp_path: Path, *parts: str) -> tuple[int, list[list[str]]]:
    """The script's exit code, and the arguments of each benchmark that it started."""
    python, asked = tmp_path / "python", tmp_path / "asked"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(python), "ASKED": str(asked), "LIMIT": "1"}
    done = subprocess.run(
        [str(SCRIPT), str(tmp_path / "out"), *parts], env=environment, capture_output=True, check=False
    )
    commands = [command.splitlines() for command in asked.read_text().split("\n\n")] if asked.exists() else []
    return done.returncode, [command for command in commands if command[:3] == ["-m", "paceline", "bench"]]


def value(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


@pytest.mark.parametrize(("parts", "runs"), [((), 8), (("table",), 2), (("fallback",), 4), (("pace",), 2)])
def test_every_method_is_one(tmp_path: Path, parts: tuple[str, ...], runs: int) -> None:
    code, commands = run(tmp_path, *parts)
    assert code == 0
    assert [value(command, "--tier") for command in commands] == ["torch", "native"] * (runs // 2)
    for command in commands:
        methods = value(command, "--methods").split(",")
        assert methods[0] == "ar"
        assert len(methods) == len(set(methods)) >= 3
        for method in methods:
            check_method(method)
    batches = [value(command, "--limit") for command in commands if "--batch" in command]
    assert batches == ["8"] * len(batches)


def test_unknown_part(tmp_path: Path) -> None:
    assert run(tmp_path, "nonsense") == (2, [])
