"""The package as others meet it: what it exports, what it pins, what its README says."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).parents[1]


def test_every_export_is_there():
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = paceline.nonsense


def test_import_is_light():
    """torch and transformers take seconds; they are imported when they are first needed."""
    code = "import sys, paceline; assert 'torch' not in sys.modules; paceline.load; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_dependency_has_a_tested_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(need for needs in project["optional-dependencies"].values() for need in needs),
    ]
    names = {re.match(r"[\w.-]+", need).group() for need in wanted} - {"paceline"}
    pinned = dict(re.findall(r"^([\w.-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert names <= pinned.keys()
    assert pinned["torch"] == "2.13.0"


@pytest.mark.parametrize("registry", [paceline.DRAFTERS, paceline.POLICIES], ids=lambda registry: registry.kind)
def test_the_readme_lists_every_method(registry):
    readme = (ROOT / "README.md").read_text()
    assert [name for name in registry if f"\n| `{name}` |" not in readme] == []
