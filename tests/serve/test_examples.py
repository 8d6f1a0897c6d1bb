"""The files of examples/serve name options, metrics and paths that are there."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from paceline.cli.app import app
from paceline.serve.metrics import Metrics

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "serve"


def options(command: list[str]) -> set[str]:
    return {word for word in command if word.startswith("--")}


def known() -> set[str]:
    cli: Any = get_command(app)
    return {name for parameter in cli.commands["serve"].params for name in parameter.opts}


def test_the_dashboard() -> None:
    exposed = set(re.findall(r"^# HELP (\S+)", Metrics("x").text().decode(), re.MULTILINE))
    text = (EXAMPLES / "grafana.json").read_text("utf-8")
    json.loads(text)
    named = set(re.findall(r"(?:vllm|paceline):\w+", text))
    assert named
    assert {name.removesuffix("_bucket").removesuffix("_total") for name in named} <= {
        name.removesuffix("_total") for name in exposed
    }


def test_the_unit() -> None:
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string((EXAMPLES / "paceline.service").read_text("utf-8"))
    program, name, *rest = shlex.split(unit["Service"]["ExecStart"])
    assert (Path(program).name, name) == ("paceline", "serve")
    assert options(rest) <= known()
    assert int(unit["Service"]["TimeoutStopSec"]) > 30  # the default of --drain


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd-analyze")
def test_what_systemd_says_of_it(tmp_path: Path) -> None:
    text = (EXAMPLES / "paceline.service").read_text("utf-8")
    (tmp_path / "paceline.service").write_text(text.replace("/opt/paceline/bin/paceline", sys.executable))
    checked = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "paceline.service")], capture_output=True, text=True, check=False
    )
    assert "paceline.service" not in checked.stderr


def test_the_image() -> None:
    lines = (EXAMPLES / "Dockerfile").read_text("utf-8").splitlines()
    instructions = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    assert {word for word, _, _ in instructions} <= {
        *("FROM", "RUN", "WORKDIR", "COPY", "USER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT"),
    }
    [entry] = [json.loads(rest) for word, _, rest in instructions if word == "ENTRYPOINT"]
    assert entry[:2] == ["paceline", "serve"]
    assert options(entry) <= known()
    torch, install = [rest for _, _, rest in instructions if "pip install" in rest]
    [version] = re.findall(r"torch==\S+", torch)
    assert version in (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    assert all((ROOT / part).exists() for part in shlex.split(install) if part.startswith("./"))
