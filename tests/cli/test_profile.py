from __future__ import annotations

import json
import os

import pytest


def test_profile_prints_and_stores(run, tiny_model_dir, cache_dir):
    words = ("profile", "-m", tiny_model_dir, "--context", 64, "--repeats", 3, "--drafter", "prompt-lookup")
    code, out, err = run(*words, "--json")
    told = json.loads(out)
    assert code == 0
    assert list(told["passes"]) == ["1", "2", "4", "8", "16", "32", "64"]
    for timing in [*told["passes"].values(), told["drafts"]["prompt-lookup"]]:
        assert 0 < timing["low"] <= timing["median"] <= timing["high"]
        assert timing["repeats"] >= 1
    assert (told["tier"], told["dtype"], told["device"], told["context"]) == (told["tier"], "float32", "cpu", 64)
    [file] = (cache_dir / "profiles").iterdir()
    assert err == f"stored in {file}\n"
    assert file.name.endswith(f"-{told['tier']}-{told['threads']}.json")
    assert json.loads(file.read_text()) == told

    assert "T(64)" in run(*words).out
    assert len(list((cache_dir / "profiles").iterdir())) == 1  # the new one in place of the old


def test_a_drafter_that_proposes_nothing(run, tiny_model_dir):
    code, out, _ = run("profile", "-m", tiny_model_dir, "--context", 8, "--repeats", 1, "--drafter", "none")
    assert code == 0
    assert "none: proposed nothing" in out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--context", 250), "context of 256"),
        (("--drafter", "nope"), "unknown drafter"),
        (("--repeats", 0), "--repeats"),
    ],
)
def test_refused(run, tiny_model_dir, words, part):
    code, out, err = run("profile", "-m", tiny_model_dir, *words)
    assert code in (1, 2)
    assert out == ""
    assert err.count("\n") == 1
    assert part in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_cache_that_cannot_be_written(run, tiny_model_dir, cache_dir):
    cache_dir.mkdir()
    cache_dir.chmod(0o500)
    code, _, err = run("profile", "-m", tiny_model_dir, "--context", 8, "--repeats", 1)
    assert code == 1
    assert "PACELINE_CACHE" in err
