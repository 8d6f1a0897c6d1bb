"""The simulations of docs/simulation.md run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(("script", "row"), [("budgets.py", "budget=auto"), ("stopping.py", "pace")])
def test_a_few_rounds(script: str, row: str) -> None:
    command = [sys.executable, str(SCRIPTS / script), "--rounds", "5", "--seeds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert row in done.stdout
