"""`paceline rest build` on a tiny model and corpus."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli import main


def test_build_and_use(tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    out = tmp_path / "store"
    model = ["--model", str(tiny_model_dir)]
    assert main(["rest", "build", *model, "--corpus", str(corpus), "--out", str(out), "--json"]) == 0
    built = json.loads(capsys.readouterr().out)
    assert built["tokens"] > 100
    assert (out / "datastore.safetensors").stat().st_size == built["bytes"]
    use = ["--drafter", f"rest:datastore={out}:budget=4", "--max-new-tokens", "4", "--raw"]
    assert main(["generate", "the quick", *model, *use, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["tokens"]) <= 4
    assert told["stats"]["drafted"] > 0


def test_into_the_cache(tiny_model_dir: Path, tmp_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture) -> None:
    """Where the drafter looks when it is not told."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("some text\n" * 9)
    model = ["--model", str(tiny_model_dir)]
    assert main(["rest", "build", *model, "--corpus", str(corpus)]) == 0
    assert "tokens in" in capsys.readouterr().out
    assert main(["generate", "some", *model, "--drafter", "rest", "--max-new-tokens", "3", "--raw", "--json"]) == 0


def test_missing_corpus(tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["rest", "build", "--model", str(tiny_model_dir), "--corpus", str(tmp_path / "nowhere.txt")]
    assert main([*command, "--out", str(tmp_path / "store")]) == 1
    assert "nowhere.txt" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()
