"""`paceline bench --endpoint` against paceline's own server."""

from __future__ import annotations

import json
from pathlib import Path

from paceline import LLM
from paceline.bench import BenchConfig, run
from serve.conftest import Running


def test_counts_are_the_servers(server: Running, tiny: LLM, tmp_path: Path) -> None:
    suite = tmp_path / "suite.jsonl"
    texts = ["abc abc abc abc", "abab abab abab"]
    suite.write_text("".join(json.dumps({"id": text, "task": "t", "turns": [text]}) + "\n" for text in texts))
    asked = {"suite": str(suite), "out": tmp_path / "out", "max_new_tokens": 24, "progress": False}
    summary = run(BenchConfig(model="", endpoints=f"served={server.url}/v1", **asked))
    alone = [tiny.generate(text, max_new_tokens=24) for text in texts]
    calls = [json.loads(line) for line in (tmp_path / "out" / "runs.jsonl").read_text().splitlines()]
    assert [call["texts"] for call in calls] == [[output.text] for output in alone]
    assert [call["tokens"] for call in calls] == [[len(output.tokens)] for output in alone]
    drafts, drafted, accepted = map(sum, zip(*(call["drafts"] for call in calls), strict=True))
    assert 0 < accepted <= drafted
    assert drafts <= drafted
    row = summary.rows[0]
    assert (row["v_d"], row["r_d"]) == (accepted / drafted, accepted / row["tokens"])
    assert row["tau"] == row["tokens"] / (row["tokens"] - accepted)
    assert row["ttft_s"] is not None
    assert row["identical"] == 2
