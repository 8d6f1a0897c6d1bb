"""Two checkouts compared: what counts as slower, and which is the last release."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def against() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("against")


class FakeSide:
    """Decodes in seconds that the test gives, by the name of the sources' folder."""

    seconds: dict[str, list[float]]
    tokens: dict[str, int]

    def __init__(self, sources: Path, tier: str, model: str, dtype: str) -> None:
        self.name, self.calls = sources.name, 0

    def ask(self, **what: Any) -> dict[str, Any]:
        self.calls += 1
        found = self.seconds[self.name]
        return {"seconds": found[self.calls % len(found)], "tokens": self.tokens.get(self.name, 0)}

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("seconds", "tokens", "worse"),
    [
        ([1.0, 1.1], {}, None),
        ([1.3, 1.4], {}, "native, none: slower, 0.786"),
        ([0.8], {}, None),
        ([1.0], {"other": 1}, "native, none: token ids differ"),
    ],
)
def test_slower_is_what_noise_does_not_explain(
    against: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: list[float],
    tokens: dict[str, int],
    worse: str | None,
) -> None:
    other = tmp_path / "other"
    (other / "paceline").mkdir(parents=True)
    FakeSide.seconds, FakeSide.tokens = {"src": seconds, "other": [1.05, 1.0, 1.1]}, tokens
    monkeypatch.setattr(against, "Side", FakeSide)
    monkeypatch.setattr(sys, "argv", ["against.py", str(other), "--judge", "--tiers", "native", "--methods", "none"])
    rows = tmp_path / "rows.jsonl"
    sys.argv += ["--rows", str(rows), "--names", "tree", "v0.1.0"]
    if worse:
        with pytest.raises(SystemExit, match=worse):
            against.main()
    else:
        against.main()
    row = json.loads(rows.read_text())
    assert (row["release"], row["against"]) == ("tree", "v0.1.0")
    assert (row["ratios"]["native"]["none"] < 0.9) == bool(worse and "slower" in worse)


@pytest.mark.parametrize(("count", "place"), [(6, 0), (9, 1), (18, 4), (60, 21)])
def test_the_interval_of_a_median(against: ModuleType, count: int, place: int) -> None:
    """Places are those of tables of the sign test, 95 %."""
    assert against.median_interval([float(n) for n in reversed(range(count))]) == (place, count - 1 - place)


def test_five_values_do_not_say(against: ModuleType) -> None:
    low, high = against.median_interval([0.9] * 5)
    assert low < 0.5
    assert high > 2


def test_without_a_release_a_commit_must_be_named(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    script = tmp_path / "benchmarks/quick.sh"
    script.write_text((ROOT / "benchmarks/quick.sh").read_text())
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    for words, said in (([], "name a commit"), (["nothing"], "there is no commit nothing")):
        result = subprocess.run(["bash", script, *words], capture_output=True, text=True, env=environment, check=False)
        assert result.returncode == 2
        assert said in result.stderr
        assert result.stderr.count("\n") == 1
