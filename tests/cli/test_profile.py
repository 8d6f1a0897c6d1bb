from __future__ import annotations

import json

import pytest

from paceline.profiling import WIDTHS, Roofline
from paceline.targets.native import available

FASTEST = "native" if available() else "torch"


@pytest.fixture(autouse=True)
def roof(monkeypatch):
    """Measuring the roofline takes seconds."""
    monkeypatch.setattr("paceline.profiling.profile.measure_roofline", lambda device, dtype: Roofline(1e9, 1e10))


def test_profile_prints_and_stores(run, tiny_model_dir, cache_dir):
    drafter = f"draft-model:model={tiny_model_dir}"
    words = ("profile", "-m", tiny_model_dir, "--context", 64, "--repeats", 3, "--drafter", drafter)
    code, out, err = run(*words, "--json")
    assert code == 0
    [told] = json.loads(out)["profiles"]
    assert list(told["passes"]) == [str(width) for width in WIDTHS]
    for timing in [*told["passes"].values(), told["drafts"][drafter]]:
        assert 0 < timing["low"] <= timing["median"] <= timing["high"]
        assert timing["repeats"] >= 1
    assert (told["tier"], told["dtype"], told["device"], told["context"]) == (FASTEST, "float32", "cpu", 64)
    [file] = (cache_dir / "profiles").iterdir()
    assert err == f"stored in {file}\n"
    assert file.name.endswith(f"-{told['tier']}-{told['threads']}.json")
    assert json.loads(file.read_text()) == told

    assert "T(64)" in run(*words).out
    assert len(list((cache_dir / "profiles").iterdir())) == 1  # the new one in place of the old


def test_tiers_side_by_side(run, tiny_model_dir, cache_dir, tmp_path):
    pytest.importorskip("matplotlib")
    words = ("profile", "-m", tiny_model_dir, "--context", 8, "--repeats", 1, "--plot", tmp_path / "plot.png")
    code, out, err = run(*words, "--tiers", "torch,reference", "--tier", "torch", "--drafter", "none")
    assert code == 0
    assert out.index("torch tier") < out.index("reference tier")
    assert out.count("none: proposed nothing") == 2
    assert out.count("exact: no") == 1
    assert "roofline 1.0 GB/s, 10 GFLOPS" in out
    assert err.count("stored in") == len(list((cache_dir / "profiles").iterdir())) == 2
    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.skipif(not available(), reason="no C++ compiler with OpenMP")
def test_what_is_promised_and_measured(run, tiny_model_dir):
    words = ("profile", "-m", tiny_model_dir, "--context", 8, "--repeats", 1, "--tiers", "native,torch", "--json")
    promised = {one["tier"]: one for one in json.loads(run(*words, "--exact").out)["profiles"]}
    assert [(one["exact"], one["noise"]) for one in promised.values()] == [(True, 0.0)] * 2
    given_up = {one["tier"]: one for one in json.loads(run(*words, "--no-exact").out)["profiles"]}
    assert (given_up["native"]["exact"], given_up["torch"]["exact"]) == (True, False)
    assert given_up["torch"]["exactness"] == "torch's own attention was asked for"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--context", 250), "context of 256"),
        (("--drafter", "nope"), "unknown drafter"),
        (("--repeats", 0), "--repeats"),
        (("--tiers", "torch,warp"), "unknown tier 'warp'"),
        (("--tiers", "torch,reference", "--exact"), "the reference tier cannot be exact here"),
        (("--plot", "plot.gif"), "ends in .png"),
    ],
)
def test_refused(run, tiny_model_dir, words, part):
    code, out, err = run("profile", "-m", tiny_model_dir, *words)
    assert code in (1, 2)
    assert out == ""
    assert err.count("\n") == 1
    assert part in err


def test_cache_that_cannot_be_written(run, tiny_model_dir, cache_dir):
    cache_dir.write_text("")
    code, out, err = run("profile", "-m", tiny_model_dir, "--context", 8, "--repeats", 1)
    assert code == 1
    assert "PACELINE_CACHE" in err
    assert "T(1)" in out  # what was measured is not lost
