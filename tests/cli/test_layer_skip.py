from __future__ import annotations

import json

import pytest


@pytest.fixture
def suite(tmp_path):
    file = tmp_path / "suite.jsonl"
    file.write_text(json.dumps({"id": "a", "task": "chat", "turns": ["hello there hello there"]}) + "\n")
    return file


def test_a_search_is_stored_where_layer_skip_finds_it(run, tiny_model_dir, suite, cache_dir):
    words = ("layer-skip", "search", "-m", tiny_model_dir, "--suite", suite, "--new-tokens", 4)
    code, out, _ = run(*words, "--trials", 2, "--json")
    told = json.loads(out)
    assert code == 0
    assert told["found"]["trials"] == 2
    stored = json.loads(next((cache_dir / "layer-skip").glob("*.json")).read_text())
    assert (stored["attention"], stored["mlp"]) == (told["attention"], told["mlp"])
    assert run("generate", "hello", "-m", tiny_model_dir, "-n", 3, "-d", f"layer-skip:skip={told['out']}").code == 0

    code, out, _ = run(*words, "--trials", 3, "--resume")
    assert code == 0
    assert "skipped attention: " in out
    assert "times plain decoding" in out
    assert json.loads(next((cache_dir / "layer-skip").glob("*.json")).read_text())["found"]["trials"] == 3


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (("layer-skip",), 2, "Missing command"),
        (("layer-skip", "search"), 2, "--suite"),
        (("layer-skip", "search", "--suite", "missing.jsonl"), 1, "missing.jsonl"),
        (("layer-skip", "search", "--suite", "{suite}", "--trials", "0"), 2, "--trials"),
    ],
)
def test_refused(run, suite, words, code, part):
    result = run(*(word.format(suite=suite) for word in words))
    assert (result.code, result.out) == (code, "")
    assert result.err.count("\n") == 1
    assert part in result.err
