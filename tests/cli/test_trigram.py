"""`paceline trigram build` on a tiny model and corpus."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli import main


def test_build_and_use(tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    out = tmp_path / "matrix"
    model = ["--model", str(tiny_model_dir)]
    assert main(["trigram", "build", *model, "--corpus", str(corpus), "--out", str(out), "--json"]) == 0
    built = json.loads(capsys.readouterr().out)
    assert built["tokens"] > 100
    assert (out / "matrix.safetensors").stat().st_size == built["bytes"]
    use = ["--drafter", f"trigram:matrix={out}", "--max-new-tokens", "4", "--raw"]
    assert main(["generate", "the quick", *model, *use, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) <= 4


@pytest.mark.parametrize(
    "wrong",
    [["--order", "7"], ["--threshold", "many"], ["--threshold", "9" * 5000], ["--threshold", "0"], ["--memory", "0"]],
)
def test_wrong_options(
    wrong: list[str], tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("some text\n")
    command = ["trigram", "build", "--model", str(tiny_model_dir), "--corpus", str(corpus), *wrong]
    assert main([*command, "--out", str(tmp_path / "matrix")]) == 1
    assert capsys.readouterr().err.strip().startswith("error: ")
    assert not (tmp_path / "matrix" / "matrix.safetensors").exists()


def test_missing_corpus(tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["trigram", "build", "--model", str(tiny_model_dir), "--corpus", str(tmp_path / "nowhere.txt")]
    assert main([*command, "--out", str(tmp_path / "matrix")]) == 1
    assert "nowhere.txt" in capsys.readouterr().err


def test_for_llama_cpp(tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus, made = tmp_path / "corpus.txt", tmp_path / "static.bin"
    corpus.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    model = ["--model", str(tiny_model_dir)]
    assert main(["trigram", "build", *model, "--corpus", str(corpus), "--out", str(tmp_path / "matrix")]) == 0
    command = ["export", "llama-cpp-lookup", *model, "--matrix", str(tmp_path / "matrix"), "--out", str(made), "--json"]
    capsys.readouterr()
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert made.stat().st_size == 20 * told["pairs"] + 8 * told["trigrams"] > 0
    assert main(command) == 1
    assert "is there already" in capsys.readouterr().err
    assert main([*command[:-1], "--matrix", "none", "--out", str(tmp_path / "other.bin")]) == 1
    assert "paceline trigram build" in capsys.readouterr().err
    assert not (tmp_path / "other.bin").exists()
