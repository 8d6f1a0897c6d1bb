"""`benchmarks/serving.py`: what is counted of the answers, and how it is shown."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def serving() -> ModuleType:
    pytest.importorskip("httpx")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return importlib.import_module("serving")


def test_what_a_user_sees_is_from_the_first_token_on(serving: ModuleType) -> None:
    answers = [serving.Answered(11, 1.0, 3.0), serving.Answered(21, 0.5, 2.5), serving.Answered(1, 0.5, 0.5)]
    assert serving.user_speed(answers) == pytest.approx((10 / 2 + 20 / 2) / 2)
    assert serving.user_speed(answers[2:]) is None


def test_table(serving: ModuleType) -> None:
    row = {"way": "auto", "tokens_per_s": 40.0, "user_tokens_per_s": 12.5, "first_token_s": 0.25, "request_s": 3.0}
    shown = serving.table([row | {"clients": 1}, row | {"clients": 4, "user_tokens_per_s": None}])
    assert shown.splitlines() == [
        "| clients | 1 | 4 |",
        "| --- | --: | --: |",
        "| auto | 40.0, 12.5 (0.25, 3.00) | 40.0, 0.0 (0.25, 3.00) |",
    ]


@pytest.mark.parametrize(("speeds", "counts"), [([3.0, 1.0, 2.0], 2.0), ([4.0, 1.0, 3.0, 2.0], 2.0), ([5.0], 5.0)])
def test_the_median_turn_counts(serving: ModuleType, speeds: list[float], counts: float) -> None:
    assert serving.middle([{"tokens_per_s": speed} for speed in speeds])["tokens_per_s"] == counts


def test_ratios_are_of_turns_that_follow_each_other(serving: ModuleType) -> None:
    speeds = {"plain": [10.0, 5.0, 2.0], "auto": [20.0, 7.5, 2.0]}
    rows = [
        serving.middle([{"way": way, "clients": 4, "tokens_per_s": speed} for speed in turns])
        for way, turns in speeds.items()
    ]
    assert serving.ratio(rows, "auto", "plain") == {4: 1.5}
