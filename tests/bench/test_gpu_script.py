"""`benchmarks/gpu.sh`, which runs whole only where there is a GPU: each program knows its options."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.app import app

ROOT = Path(__file__).parents[2]
# Stands for Python: writes its arguments down, one a line, and fails where the last one is $REFUSED.
STAND_IN = '#!/bin/sh\nprintf "%s\\n" "$@" "" >> "$ASKED"\nfor last; do :; done\n[ "$last" != "$REFUSED" ]\n'


def dry_run(tmp_path: Path, refused: str = "") -> tuple[int, list[list[str]]]:
    """The script's exit code, and the arguments of each program that it started."""
    python, asked = tmp_path / "python", tmp_path / "asked"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(python), "ASKED": str(asked), "REFUSED": refused}
    script = [str(ROOT / "benchmarks" / "gpu.sh"), "--dry-run", str(tmp_path / "out")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    commands = [command.splitlines() for command in asked.read_text().strip().split("\n\n")]
    assert [line.split(" ")[:4] for line in done.stdout.splitlines()] == [
        ["timeout", line.split(" ")[1], str(python), command[0]]
        for line, command in zip(done.stdout.splitlines(), commands, strict=True)
    ]
    return done.returncode, commands


def test_each_program_knows_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    code, (tests, *passes, text) = dry_run(tmp_path)
    assert code == 0
    assert not (tmp_path / "out").exists()
    assert tests == ["-m", "pytest", "-q", "-m", "gpu", "tests", "--markers"]
    assert any(marker.startswith("gpu:") for marker in request.config.getini("markers"))
    assert [command[command.index("--shape") + 1] for command in passes] == ["1b", "7b"]
    for command in passes:
        assert command[-1] == "--check"
        monkeypatch.setattr("sys.argv", command)
        runpy.run_path(str(ROOT / command[0]), run_name="__main__")
    assert text[:2] == ["-m", "paceline"]
    assert text[-1] == "--help"
    assert CliRunner().invoke(app, text[2:]).exit_code == 0


def test_an_option_that_is_not_there_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, (_, measure, _, text) = dry_run(tmp_path)
    monkeypatch.setattr("sys.argv", [*measure, "--turns"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / measure[0]), run_name="__main__")
    assert CliRunner().invoke(app, [*text[2:-1], "--turns", "--help"]).exit_code == 2


@pytest.mark.parametrize(("refused", "started"), [("--markers", 1), ("--check", 2), ("--help", 4)])
def test_it_stops_where_a_program_refuses(refused: str, started: int, tmp_path: Path) -> None:
    code, commands = dry_run(tmp_path, refused)
    assert code != 0
    assert len(commands) == started
