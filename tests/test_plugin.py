"""A package outside the tree, `examples/plugin`, with a drafter, a policy and a head, known by entry points alone."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import paceline
from paceline import DRAFTERS, POLICIES
from paceline.drafters.early_exit.drafter import EarlyExit
from tiny import byte_tokenizer

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "examples" / "plugin"


class Installed(NamedTuple):
    site: Path  # where pip has put the package
    script: dict[str, Any]  # of `make_head.py`, which has been run


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The package as pip installs it, with the head that its script makes."""
    work, site = tmp_path_factory.mktemp("work") / "plugin", tmp_path_factory.mktemp("site")
    shutil.copytree(PLUGIN, work, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    script = runpy.run_path(str(work / "make_head.py"), run_name="__main__")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", site, work], check=True)
    return Installed(site, script)


def test_conformance(installed: Installed) -> None:
    """The drafter under every policy, the policy with drafters of each kind; on one model, which is enough for both."""
    kinds = "prompt-lookup or draft-model or eagle or oracle"
    paths = [str(installed.site), *filter(None, [os.environ.get("PYTHONPATH")])]
    words = ["-p", "no:cacheprovider", "-q", "tests/test_conformance.py", "-m", "not model"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "-k", f"llama and (echo or (streak and ({kinds})))"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) > 3 * len(list(POLICIES)), done.stdout


def test_names(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "echo" not in DRAFTERS
    monkeypatch.syspath_prepend(installed.site)
    assert DRAFTERS.parse("echo:k_max=2").cls.__module__ == "paceline_example.echo"
    assert POLICIES.parse("streak").cls.__module__ == "paceline_example.streak"


def test_head(installed: Installed, monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    """It is found by the model's name, loaded, and drafts."""
    monkeypatch.syspath_prepend(installed.site)
    llm = paceline.load(installed.script["tiny_model"](), drafter="early-exit+fixed:k=3", tokenizer=byte_tokenizer())
    assert isinstance(llm.drafter, EarlyExit)
    assert llm.drafter.folder == installed.site / "paceline_example" / "heads"
    output = llm.generate("Count to twenty.", max_new_tokens=12, eos=())
    assert output.tokens == llm.method("none").generate("Count to twenty.", max_new_tokens=12, eos=()).tokens
    assert output.stats.drafted > 0


def test_contributing_shows_these_files() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    shown = [
        textwrap.dedent(block) for block in re.findall(r"^ *```python\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    ]
    assert shown == [
        (PLUGIN / "paceline_example" / f"{name}.py").read_text(encoding="utf-8") for name in ("echo", "streak")
    ]
