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


def test_the_lowest_promised_versions_are_those_that_are_tested():
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    promised = dict(need.split(">=") for need in needs)
    tested = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints-lowest.txt").read_text(), re.MULTILINE))
    assert tested.keys() == promised.keys()
    for name, lowest in promised.items():  # 2.6 is 2.6.0
        assert re.fullmatch(re.escape(lowest) + r"(\.0)*", tested[name]), name


def test_the_changelog_begins_with_what_is_unreleased_and_then_this_version():
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(re.escape(paceline.__version__) + r" - \d{4}-\d{2}-\d{2}", headings[1])


def test_type_checkers_are_told_that_there_are_types():
    assert (Path(paceline.__file__).parent / "py.typed").is_file()


def test_no_two_classes_share_a_name():
    """Who reads one name in two files should not have to ask which is meant."""
    files = (ROOT / "src").rglob("*.py")
    names = [name for file in files for name in re.findall(r"^class (\w+)", file.read_text(), re.MULTILINE)]
    assert [name for name in set(names) if names.count(name) > 1] == []
