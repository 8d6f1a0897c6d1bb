from __future__ import annotations

import json


def test_a_page_for_results_and_for_a_training(run, tmp_path):
    row = {"method": "ar", "task": "overall", "temperature": 0, "batch": 1, "prompts": 1, "tokens": 1, "wrong": 0}
    row |= {"speedup_ar": 1.0, "tokens_per_s": 12.5, "split": None}
    settings = {"model": "m", "suite": "s", "methods": ["ar"], "max_new_tokens": 1, "batch": 1}
    config = {"settings": settings, "machine": {"cpu": "c", "threads": 1}, "date": "2026", "tier": "t", "dtype": "d"}
    (tmp_path / "results.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = run("report", tmp_path)
    assert (code, out.strip()) == (0, str(tmp_path / "report.html"))
    assert "12.5" in (tmp_path / "report.html").read_text()

    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.5}\n{"step": 1, "loss": 1.25}\n')
    code, out, _ = run("report", tmp_path)
    assert (code, out.strip()) == (0, str(tmp_path / "curves.html"))


def test_other_folders_are_refused(run, tmp_path):
    result = run("report", tmp_path / "missing")
    assert (result.code, result.out) == (1, "")
    assert result.err.count("\n") == 1
    assert "no complete results" in result.err
    file = tmp_path / "results.jsonl"
    file.touch()
    result = run("report", file)
    assert (result.code, result.out) == (1, "")
    assert result.err == f"error: {file} is a file: name the folder of the results\n"
