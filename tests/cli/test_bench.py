from __future__ import annotations

import json

import pytest


@pytest.fixture
def suite(tmp_path):
    file = tmp_path / "suite.jsonl"
    rows = [
        {"id": f"{task}-{i}", "task": task, "turns": [f"{task} {i} " * 5]} for task in ("chat", "edit") for i in (1, 2)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_options_reach_the_benchmark(run, tiny_model_dir, suite, tmp_path):
    words = ["bench", "-m", tiny_model_dir, "--suite", suite, "--out", tmp_path / "out", "-n", 8, "--seed", 1]
    words += ["--methods", "ar,prompt-lookup", "--tasks", "edit", "--limit", 1, "--temperature", "0,0.5", "--batch", 2]
    code, out, _ = run(*words, "--json")
    told = json.loads(out)
    assert code == 0
    assert told["out"] == str(tmp_path / "out")
    assert {(row["method"], row["temperature"]) for row in told["rows"]} == {
        (method, temperature) for method in ("ar", "prompt-lookup") for temperature in (0, 0.5)
    }
    assert {(row["prompts"], row["batch"]) for row in told["rows"]} == {(1, 2)}
    assert {row["task"] for row in told["rows"]} == {"overall", "edit"}
    assert max(row["tokens"] for row in told["rows"]) <= 8

    code, out, err = run(*words)  # finished before: shown again
    assert code == 0
    assert "prompt-lookup" in out
    assert "nothing is compared" not in err


def test_a_benchmark_that_compares_nothing_says_so(run, tiny_model_dir, suite, tmp_path):
    words = ["bench", "-m", tiny_model_dir, "--suite", suite, "--out", tmp_path / "out", "-n", 2, "--limit", 1]
    code, _, err = run(*words, "--methods", "suffix")
    assert code == 0
    assert "without 'ar' among the methods nothing is compared with plain decoding" in err


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (("--out", "x"), 2, "--suite"),
        (("--suite", "missing.jsonl", "--out", "x"), 1, "missing.jsonl"),
        (("--suite", "{suite}", "--out", "x", "--temperature", "hot"), 1, "temperatures are numbers"),
        (("--suite", "{suite}", "--out", "x", "--methods", "nope"), 1, "unknown method 'nope'"),
        (("--suite", "{suite}", "--out", "x", "--batch", "0"), 2, "--batch"),
        (("--suite", "{suite}", "--out", "x", "--endpoint", "host:1"), 1, "an endpoint is [NAME=]http://"),
        (("--suite", "{suite}", "--out", "x", "--endpoint", ","), 1, "name at least one endpoint"),
        (("--suite", "{suite}", "--out", "{suite}.out", "--endpoint", "http://127.0.0.1:9"), 1, "does not answer"),
        (("--suite", "{suite}", "--out", "x", "--endpoint", "http://h", "-m", "other"), 1, "model is no option of"),
        (("--suite", "{suite}", "--out", ""), 2, "'--out' / '-o': it is empty"),
        (("--suite", "", "--out", "x"), 1, "name a suite"),
    ],
)
def test_refused(run, tiny_model_dir, suite, words, code, part):
    model = () if "--endpoint" in words else ("-m", tiny_model_dir)
    result = run("bench", *model, *(word.format(suite=suite) for word in words))
    assert (result.code, result.out) == (code, "")
    assert result.err.count("\n") == 1
    assert part in result.err
