"""Servers with the OpenAI API as methods: one made up, and paceline's own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import BenchConfig, Summary, print_summary, run
from paceline.bench.config import parse_endpoint
from paceline.bench.report import command
from paceline.errors import EndpointError, OptionError

PIECES = ("Hello", " wor", "ld")
TOKENS = 5  # of an answer, in three chunks: 2, 4, 5


class Standin(BaseHTTPRequestHandler):
    """Answers as vLLM does. Attributes of a subclass say how; `bodies` are those it was sent."""

    counts, metrics, known, pieces = True, True, True, PIECES
    status, error = 200, ""
    bodies: list[dict[str, Any]]
    keys: set[str | None]
    accepted: int

    def do_GET(self) -> None:
        type(self).keys.add(self.headers.get("Authorization"))
        if self.path == "/v1/models":
            return self._send({"data": [{"id": "a-model"}] if self.known else []})
        drafts, label = self.accepted // 3, 'model_name="a"'
        lines = [
            f"vllm:spec_decode_num_drafts_total{{{label}}} {drafts}.0",
            f"vllm:spec_decode_num_drafts_created{{{label}}} 1.7e+09",
            f"vllm:spec_decode_num_draft_tokens_total{{{label}}} {4 * drafts}.0",
            f"vllm:spec_decode_num_accepted_tokens_total{{{label}}} {self.accepted}.0",
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="0"}} 9999.0',
        ]
        return self._send("\n".join(lines) + "\n" if self.metrics else "")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).bodies.append(body)
        if self.status != 200:
            return self._send({"error": {"message": "no such thing\nat all"}}, self.status)
        if not self.counts and "continuous_usage_stats" in body["stream_options"]:
            return self._send({"message": "unknown option"}, 400)
        type(self).accepted += 3
        chunks: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        for at, piece in enumerate(self.pieces):
            usage = {"usage": {"completion_tokens": min(2 * at + 2, TOKENS), "prompt_tokens": 7}} if self.counts else {}
            chunks.append({"choices": [{"delta": {"content": piece}}], **usage})
        chunks.append({"choices": [], "usage": {"completion_tokens": TOKENS, "prompt_tokens": 7}})
        if self.error:
            chunks[2:] = [{"error": {"message": self.error}}]
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        return self._send(text)

    def _send(self, body: Any, status: int = 200) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Silence."""


@contextmanager
def standing_in(**how: Any) -> Iterator[tuple[str, type[Standin]]]:
    handler = type("Chosen", (Standin,), {"bodies": [], "keys": set(), "accepted": 0} | how)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", handler
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def measured(tmp_path: Path) -> Callable[..., Summary]:
    suite = tmp_path / "suite.jsonl"
    rows = [{"id": f"{task}{i}", "task": task, "turns": [f"{task} {i}", "And?"]} for task in "ab" for i in (1, 2)]
    suite.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def measure(endpoints: str, **more: Any) -> Summary:
        asked = {"suite": str(suite), "out": tmp_path / "out", "max_new_tokens": 12, "progress": False} | more
        return run(BenchConfig(model="", endpoints=endpoints, **asked))

    return measure


def test_names_and_addresses() -> None:
    assert parse_endpoint("http://host:8000/v1/") == ("host:8000", "http://host:8000")
    assert parse_endpoint("https://user:word@host:8443/api?a=b")[0] == "host:8443"
    assert parse_endpoint("trigram:k=3=http://host:8000") == ("trigram:k=3", "http://host:8000")
    for wrong in ("host:8000", "name=host", "ftp://host", "http://", "http://host:port"):
        with pytest.raises(OptionError, match="an endpoint is"):
            parse_endpoint(wrong)


def test_results_have_benchs_schema(measured: Callable[..., Summary], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with standing_in(metrics=False) as (plain, _), standing_in() as (drafts, handler):
        summary = measured(f"ar={plain}/v1,drafts={drafts}")
        assert measured(f"ar={plain}/v1,drafts={drafts}").rows == summary.rows  # finished: nothing is asked again
        assert len(handler.bodies) == 1 + 4  # a first one that does not count
    rows = {row["method"]: row for row in summary.rows if row["task"] == "overall"}
    assert list(rows) == ["ar", "drafts"]
    assert rows["drafts"]["tokens"] == rows["ar"]["tokens"] == 4 * TOKENS
    assert (rows["ar"]["tau"], rows["ar"]["v_d"], rows["ar"]["r_d"]) == (None, None, None)
    assert rows["drafts"]["tau"] == rows["drafts"]["acceptance_length"] == TOKENS / 2  # 3 of the 5 were drafts
    assert (rows["drafts"]["v_d"], rows["drafts"]["r_d"]) == (3 / 4, 3 / 5)
    assert (rows["drafts"]["identical"], rows["drafts"]["tie"], rows["drafts"]["wrong"]) == (4, None, None)
    assert rows["drafts"]["speedup_ar"] is not None
    assert rows["drafts"]["speedup_ar_95"] is not None
    assert rows["drafts"]["ttft_s"] is not None
    assert {row["task"] for row in summary.rows} == {"overall", "a", "b"}
    assert summary.config["served"] == {"ar": "a-model", "drafts": "a-model"}
    assert handler.keys == {"Bearer secret"}
    assert "secret" not in "".join(file.read_text() for file in summary.out.glob("*.json*"))
    assert command(summary.config["settings"]).endswith(f"--endpoint ar={plain}/v1,drafts={drafts} --out results")
    calls = [json.loads(line) for line in (summary.out / "runs.jsonl").read_text().splitlines()]
    assert [call["method"] for call in calls if call["ids"] == ["a1"]] == ["ar", "drafts"]
    assert {(*call["texts"], *call["tokens"], *call["prompt_tokens"]) for call in calls} == {("Hello world", 5, 7)}
    assert {call["latencies"][0][2] for call in calls} == {TOKENS - 2}  # two came with the first chunk
    page = (summary.out / "report.html").read_text()
    assert "a-model" in page
    assert "They are servers" in page


def test_the_summary_counts_equal_texts(measured: Callable[..., Summary], capsys: pytest.CaptureFixture[str]) -> None:
    with standing_in() as (one, _), standing_in(pieces=("Other", " text")) as (other, _):
        summary = measured(f"one={one},other={other}", limit=1)
    assert {(row["method"], row["identical"]) for row in summary.rows if row["task"] == "overall"} == {
        ("one", 2),
        ("other", 0),
    }
    print_summary(summary)
    assert "None" not in capsys.readouterr().out


def test_sampling_turns_and_batches_are_asked_for(measured: Callable[..., Summary]) -> None:
    with standing_in() as (url, handler):
        asked = {"temperatures": (0, 0.7), "top_k": 5, "top_p": 0.9, "turns": 2, "batch": 2, "seed": 3, "tasks": "a"}
        rows = measured(url, **asked).rows
    assert {(row["prompts"], row["batch"]) for row in rows} == {(4, 2)}
    assert {row["identical"] for row in rows} == {4, None}
    assert all(row["acceptance_length"] is None for row in rows)  # counters are of all that ran together
    last = [body for body in handler.bodies if len(body["messages"]) == 3]
    assert [message["content"] for message in last[0]["messages"][1:]] == ["Hello world", "And?"]
    greedy = [body for body in handler.bodies if body["temperature"] == 0]
    assert not any({"seed", "top_k", "top_p", "min_p"} & body.keys() for body in greedy)
    sampled = [body for body in last if body["temperature"] == 0.7]
    assert sorted(body["seed"] for body in sampled) == [3, 4]
    assert {(body["top_k"], body["top_p"], body.get("min_p")) for body in sampled} == {(5, 0.9, None)}


def test_a_server_that_does_not_count_along(measured: Callable[..., Summary]) -> None:
    with standing_in(counts=False) as (url, handler):
        [row, *_] = measured(url, limit=1).rows
    assert row["tokens"] == 2 * TOKENS  # told in the end
    assert sum("continuous_usage_stats" in body["stream_options"] for body in handler.bodies) == 1


def test_a_server_that_sends_tokens_in_pieces(measured: Callable[..., Summary]) -> None:
    """And says at the end how many there were."""
    with standing_in(counts=False, pieces=tuple("Hello, world!")) as (url, _):
        [row, *_] = measured(url, limit=1).rows
    assert row["tokens"] == 2 * TOKENS


def test_an_empty_answer_has_its_end(measured: Callable[..., Summary], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.TOKENS", 0)
    with standing_in(pieces=()) as (url, _):
        [row, *_] = measured(url, limit=1).rows
    assert (row["tokens"], row["identical"]) == (2, 2)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"known": False}, "one: .* names no model"),
        ({"status": 404}, "one: /v1/chat/completions was refused: 404 no such thing"),
        ({"error": "out of memory"}, "one: out of memory"),
        ({"pieces": (7,)}, "one: .* sent no answer of the API"),
    ],
)
def test_a_server_that_fails(measured: Callable[..., Summary], how: dict[str, Any], message: str) -> None:
    with standing_in(**how) as (url, _), pytest.raises(EndpointError, match=f"^{message}"):
        measured(f"one={url}")


def test_a_server_that_is_not_there(measured: Callable[..., Summary]) -> None:
    with standing_in() as (url, _):
        pass
    with pytest.raises(EndpointError, match=r"one: .* does not answer"):
        measured(f"one={url}")


def test_options_of_models_are_refused(measured: Callable[..., Summary]) -> None:
    for option in ({"dtype": "float32"}, {"methods": "ar,trigram"}, {"trace": True}):
        with pytest.raises(OptionError, match="is no option of endpoints"):
            measured("http://127.0.0.1:1", **option)
    with pytest.raises(OptionError, match=r"^endpoints: .*named twice"):
        measured("http://127.0.0.1:1,http://127.0.0.1:1/v1")
    with pytest.raises(OptionError, match="name at least one endpoint"):
        measured(" ,")
