from __future__ import annotations

import json

import pytest

from paceline.cli.options import ModelOptions


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


def test_a_place_that_cannot_be_written_is_refused_before_the_search(run, suite, tmp_path, monkeypatch):
    monkeypatch.setattr(ModelOptions, "llm", lambda *_: pytest.fail("the model was loaded"))
    words = ("layer-skip", "search", "--suite", suite)
    for out, part in ((tmp_path, "is a folder"), ("", "it is empty"), (suite / "x.json", "is a file, no folder")):
        result = run(*words, "-o", out)
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
        assert part in result.err
    result = run(*words, "-o", tmp_path / "new.json", "--resume")
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert "new.json.journal to go on from" in result.err
    assert list(tmp_path.iterdir()) == [suite]


def test_nothing_to_go_on_from_in_the_cache(run, suite, tiny_model_dir, cache_dir):
    result = run("layer-skip", "search", "--suite", suite, "-m", tiny_model_dir, "--resume")
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert "leave out --resume" in result.err
    assert not list(cache_dir.rglob("*.journal"))
