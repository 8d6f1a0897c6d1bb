"""Clients that go, queues that fill, drafters that fail, servers that are told to stop."""

from __future__ import annotations

import json
import logging
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import httpx
import pytest

from paceline import LLM
from paceline.decoding.engine import Engine
from paceline.errors import OptionError
from paceline.serve.app import make_app
from paceline.serve.requests import LONG as TEXT_LENGTH
from paceline.serve.requests import FrontDesk
from paceline.serve.settings import Settings
from paceline.serve.tools import ToolText
from serve.conftest import Running, serving, wait_until

LONG: dict[str, Any] = {"prompt": "abcabc", "temperature": 0, "max_tokens": 450, "ignore_eos": True}


def free(server: Running) -> bool:
    return server.worker.engine.idle and server.worker._pending == 0


class TestLoad:
    def test_random_arrivals_get_what_they_get_alone(self, server: Running, tiny: LLM) -> None:
        """Drafters, lengths and seeds at random; some clients vanish in the middle of a stream."""
        pick = random.Random(0)
        methods: list[dict[str, Any]] = [{"drafter": "suffix"}, {"drafter": "none"}, {"speculate": False}, {}]
        bodies: list[dict[str, Any]] = [
            {
                "prompt": "".join(pick.choices("abc ", k=pick.randint(1, 40))),
                "max_tokens": pick.randint(1, 30),
                "temperature": pick.choice([0, 0.8]),
                "seed": seed,
                "paceline": pick.choice(methods),
            }
            for seed in range(24)
        ]

        def answer(body: dict[str, Any]) -> str:
            if body["seed"] % 4 == 0:
                vanish(server)
            text: str = server.post("/v1/completions", json=body).json()["choices"][0]["text"]
            return text

        with ThreadPoolExecutor(5) as pool:
            got = list(pool.map(answer, bodies))
        wait_until(lambda: free(server))
        for body, text in zip(bodies, got, strict=True):
            sampling = {"temperature": body["temperature"], "seed": body["seed"], "max_new_tokens": body["max_tokens"]}
            assert text == tiny.generate(body["prompt"], chat=False, **sampling).text

    def test_whoever_goes_frees_a_row(self, server: Running) -> None:
        vanish(server)
        wait_until(lambda: free(server))
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=LONG | {"n": 3}, timeout=0.2)
        wait_until(lambda: free(server))
        assert 'finished_reason="abort"' in server.get("/metrics").text

    def test_a_full_queue(self, server: Running) -> None:
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(server.post, "/v1/completions", json=LONG | {"n": 11})
            wait_until(lambda: not free(server))
            answer = server.post("/v1/completions", json=LONG | {"n": 11})
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
            assert waits.result().status_code == 200
        wait_until(lambda: free(server))

    def test_more_than_it_can_ever_take(self, server: Running) -> None:
        """To wait and try again would not help."""
        answer = server.post("/v1/completions", json=LONG | {"n": 12})
        assert answer.status_code == 400
        assert "12 answers at once are asked for; here 11 at most" in answer.text
        assert free(server)

    def test_long_texts_wait_in_line(self, llms: dict[str, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
        """One is read at a time, in one thread; those of clients that have gone are not read."""
        reading, go, read = Event(), Event(), list[str]()

        def encode(self: FrontDesk, text: str, special: bool = True) -> list[int]:
            if len(text) > TEXT_LENGTH:
                read.append(text[0])
                reading.set()
                assert go.wait(20)
            return [1, 2, 3]

        monkeypatch.setattr(FrontDesk, "encode", encode)
        with serving(llms, Settings(rows=1, context=128, keep=0)) as server, ThreadPoolExecutor(1) as pool:
            body: dict[str, Any] = {"max_tokens": 1}
            first = pool.submit(server.post, "/v1/completions", json=body | {"prompt": "a" * (TEXT_LENGTH + 1)})
            assert reading.wait(20)
            for _ in range(3):
                with pytest.raises(httpx.ReadTimeout):
                    httpx.post(
                        f"{server.url}/v1/completions", json=body | {"prompt": "b" * (TEXT_LENGTH + 1)}, timeout=0.2
                    )
            assert server.post("/v1/completions", json=body | {"prompt": "short"}).status_code == 200
            go.set()
            assert first.result().status_code == 200
            assert server.post("/v1/completions", json=body | {"prompt": "c" * (TEXT_LENGTH + 1)}).status_code == 200
        assert read == ["a", "c"]

    @pytest.mark.parametrize("policy", ["fixed:k=12", "schedule", "fixed:k=32"])
    def test_answers_as_long_as_the_context_under_any_policy(self, server: Running, policy: str) -> None:
        body = {"messages": [{"role": "user", "content": "abc"}], "stream": True, "paceline": {"policy": policy}}
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
        longer = server.post("/v1/chat/completions", json=body | {"paceline": {"policy": "fixed:k=33"}})
        assert longer.status_code == 400
        assert "paceline.policy: drafts up to 33 tokens a round; here 32 at most" in longer.text


def vanish(server: Running) -> None:
    """Hang up after the first chunk of a stream."""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}) as answer:
        next(answer.iter_lines())


class TestFailures:
    def test_a_drafter_that_fails(self, server: Running, tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        drafter = server.worker.llms["suffix"].drafter
        body = {"prompt": "abcabc", "temperature": 0, "max_tokens": 12, "paceline": {"drafter": "suffix"}}
        for step in ("begin", "draft", "observe", "end"):
            monkeypatch.setattr(drafter, step, _fails)
            got = server.post("/v1/completions", json=body).json()["choices"][0]["text"]
            assert got == tiny.generate("abcabc", chat=False, max_new_tokens=12).text
            monkeypatch.undo()

    def test_a_drafter_that_cannot_start(self, llms: dict[str, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
        body = {"prompt": "abcabc", "max_tokens": 4, "paceline": {"drafter": "suffix"}}
        monkeypatch.setattr(llms["suffix"].drafter, "start", _fails)
        with serving(llms, Settings(rows=1, context=128, keep=200)) as server:
            assert [server.post("/v1/completions", json=body).status_code for _ in range(2)] == [200, 200]
            desk = server.worker.engine.drafter.desks["suffix"]  # type: ignore[attr-defined]
            assert (desk.started, desk.closed) == (False, True)
            monkeypatch.undo()
            assert server.post("/v1/completions", json=body).status_code == 200
            assert (desk.started, desk.closed) == (True, False)  # tried again

    def test_a_text_that_cannot_be_kept(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        """For prompts that begin like it; the answer is given all the same, and so are others'."""
        monkeypatch.setattr("paceline.decoding.blocks.TokenBlocks.put", _fails)
        body = {"prompt": "abcabcabcabc", "max_tokens": 4, "n": 2}
        assert server.post("/v1/completions", json=body).status_code == 200
        monkeypatch.setattr("paceline.decoding.prefixes.PrefixStore.restore", _fails)
        assert server.post("/v1/completions", json=body).status_code == 500
        monkeypatch.undo()
        assert server.post("/v1/completions", json=body).status_code == 200
        wait_until(lambda: free(server))

    def test_text_that_cannot_be_read(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        body = {"prompt": "abcabc", "max_tokens": 4}
        monkeypatch.setattr("paceline.decoding.text.TextStream.push", _fails)
        assert server.post("/v1/completions", json=body).status_code == 500
        monkeypatch.undo()
        assert server.post("/v1/completions", json=body).status_code == 200
        assert free(server)

    def test_an_engine_that_fails(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        """Wherever: who waits is told, and the next request is answered."""
        body = {"prompt": "abcabc", "max_tokens": 4}
        for name in ("_lead", "cancel"):
            monkeypatch.setattr(server.worker.engine, "_round", _fails)
            monkeypatch.setattr(server.worker.engine, name, _fails)
            assert server.post("/v1/completions", json=body).status_code == 500
            monkeypatch.undo()
            assert server.post("/v1/completions", json=body).status_code == 200
        wait_until(lambda: free(server))

    def test_a_round_that_fails(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        body = {"prompt": "abcabc", "max_tokens": 4}
        monkeypatch.setattr(server.worker.engine, "_round", _fails)
        assert server.post("/v1/completions", json=body).status_code == 500
        answer = server.post("/v1/completions", json=body | {"stream": True})
        assert answer.json()["error"]["type"] == "server_error"
        monkeypatch.setattr(server.worker.engine.target, "prefill", _fails)
        assert server.post("/v1/completions", json=body).status_code == 500
        monkeypatch.setattr(server.worker.llms["prompt-lookup"], "requests", _fails)
        assert server.post("/v1/completions", json=body).status_code == 500
        monkeypatch.undo()
        assert server.post("/v1/completions", json=body).status_code == 200

    def test_in_a_stream(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            monkeypatch.setattr(server.worker.engine, "_round", _fails)
            rest = list(lines)
        assert '"server_error"' in rest[-2]

    def test_what_nobody_foresaw(
        self, server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Its answer is one like all others."""
        monkeypatch.setattr(FrontDesk, "encode", lambda *_: 1 / 0)
        with caplog.at_level(logging.INFO, "paceline.serve"):
            answer = server.post("/v1/completions?a%0Ab", json={"prompt": "a"}, headers={"origin": "http://page"})
            # The line is written once the answer is sent, which can be after it has been read.
            wait_until(lambda: f"{answer.headers['x-request-id']} POST /v1/completions 500" in caplog.text)
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "internal error"
        assert answer.headers["access-control-allow-origin"] == "http://page"

    def test_paths_are_logged_as_sent(self, server: Running, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "paceline.serve"):
            server.get("/a%0Aforged%1b")
            wait_until(lambda: "GET /a%0Aforged%1b 404" in caplog.text)

    def test_settings(self, tiny: LLM) -> None:
        for wrong in ({"rows": 0}, {"queue": -1}, {"timeout": 0.0}, {"keys": ("one", "")}, {"keys": (" ",)}):
            with pytest.raises(OptionError):
                make_app({"none": tiny}, Settings(**wrong))


def _fails(*arguments: object, **options: object) -> Any:
    raise RuntimeError("as it should")


class TestOneOfItsOwn:
    def test_keys_timeouts_and_the_end(self, llms: dict[str, LLM]) -> None:
        """An answer that fits the drain time is given after the server was told to stop."""
        settings = Settings(rows=1, context=500, queue=4, keep=0, timeout=0.3, keys=("one", "two"))
        with serving({"none": llms["none"]}, settings) as server:
            assert server.post("/v1/completions", json=LONG).status_code == 401
            assert server.get("/slots", headers={"authorization": "Bearer three"}).status_code == 401
            assert server.get("/health").status_code == 200
            key = {"authorization": "Bearer two"}
            late = server.post("/v1/completions", json=LONG | {"n": 4}, headers=key)
            assert late.status_code == 504
            wait_until(lambda: free(server))
            with ThreadPoolExecutor(1) as pool:
                short = LONG | {"max_tokens": 3}  # on a busy machine too
                waits = pool.submit(server.post, "/v1/completions", json=short, headers=key)
                wait_until(lambda: not free(server) or waits.done())
                server.server.should_exit = True
                assert waits.result().status_code == 200
        assert not server.worker.ready
        server.worker.close()

    @pytest.mark.parametrize("stream", [False, True])
    def test_what_does_not_end_in_time_is_told_so(
        self, llms: dict[str, LLM], monkeypatch: pytest.MonkeyPatch, stream: bool
    ) -> None:
        step = Engine.step
        monkeypatch.setattr(Engine, "step", lambda self: (time.sleep(0.05), step(self))[1])
        asked = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": stream}
        with ThreadPoolExecutor() as pool, serving(llms, Settings(rows=1, context=512, drain=0.3)) as running:
            answer = pool.submit(running.post, "/v1/completions", json=asked)
            wait_until(lambda: bool(running.worker.state))
            running.server.should_exit = True
            got = answer.result()
        if stream:
            *_, last = (line for line in got.text.splitlines() if line)
            assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
        else:
            assert got.status_code == 503
            assert "shutting down" in got.json()["error"]["message"]

    def test_what_has_not_begun_in_time_is_told_so(self, llms: dict[str, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
        """A request that came in the round in which time was up."""
        step, begun = Engine.step, Event()
        monkeypatch.setattr(Engine, "step", lambda self: (begun.set(), time.sleep(0.5), step(self))[2])
        with ThreadPoolExecutor() as pool, serving(llms, Settings(rows=1, context=512, drain=0.01)) as running:
            first = pool.submit(running.post, "/v1/completions", json=LONG)
            assert begun.wait(10)
            second = pool.submit(running.post, "/v1/completions", json=LONG)
            wait_until(lambda: bool(running.worker._orders))
            running.server.should_exit = True
            assert [answer.result().status_code for answer in (first, second)] == [503, 503]

    def test_told_twice_it_waits_for_nothing(self, llms: dict[str, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
        step = Engine.step
        monkeypatch.setattr(Engine, "step", lambda self: (time.sleep(0.05), step(self))[1])
        with ThreadPoolExecutor() as pool, serving(llms, Settings(rows=1, context=512, drain=25)) as running:
            pool.submit(running.post, "/v1/completions", json=LONG)
            wait_until(lambda: bool(running.worker.state))
            for _ in range(2):
                running.server.handle_exit(signal.SIGINT, None)
            wait_until(lambda: not running.worker._thread.is_alive(), 10)


class TestToolText:
    def test_an_end_within_a_text_of_the_call(self) -> None:
        inside = {"name": "f", "arguments": {"v": 'x </tool_call> "y'}}
        text = f"<tool_call>{json.dumps(inside)}</tool_call>!"
        tools = ToolText()
        assert "".join(map(tools.push, text)) + tools.flush() == "!"
        [call] = tools.calls
        assert json.loads(call["function"]["arguments"]) == inside["arguments"]

    def test_calls_are_told_from_text(self) -> None:
        call = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
        text = f"well <b> {call}<tool_call>no</tool_call>.<tool"
        parser = ToolText()
        shown = "".join(parser.push(char) for char in text) + parser.flush()
        assert shown == "well <b> <tool_call>no</tool_call>.<tool"
        [told] = parser.calls
        assert told["function"] == {"name": "look", "arguments": '{"at": 1}'}

    def test_of_several_the_first(self) -> None:
        call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
        parser = ToolText(several=False)
        assert parser.push(call + call) + parser.flush() == ""
        assert len(parser.calls) == 1

    def test_what_is_no_call_stays_text(self) -> None:
        deep = '{"name": "look", "arguments": ' + "[" * 5000 + "]" * 5000 + "}"
        halves = [r'{"name": "\ud83d"}', r'{"name": "look", "arguments": {"at": "\ud83d"}}']  # of surrogate pairs
        for inside in ("[1]", '{"name": 3}', '{"arguments": {}}', deep, *halves):
            parser = ToolText()
            assert parser.push(f"<tool_call>{inside}</tool_call>") == f"<tool_call>{inside}</tool_call>"
            assert not parser.calls
