"""The official client is the oracle of the protocol; the offline engine that of the tokens."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from paceline import LLM
from paceline.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest
from serve.conftest import Running

CHAT = [{"role": "user", "content": "abcabcabc"}]
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 24}


def offline(tiny: LLM, prompt: Any, **sampling: Any) -> Any:
    return tiny.generate(prompt, **{"max_new_tokens": 24} | sampling)


class TestChat:
    @pytest.mark.parametrize("drafter", ["prompt-lookup", "suffix", "none"])
    def test_an_answer(self, server: Running, tiny: LLM, drafter: str) -> None:
        got = server.client().chat.completions.create(
            messages=CHAT, **GREEDY, extra_body={"paceline": {"drafter": drafter}}
        )
        want = offline(tiny, CHAT)
        assert got.choices[0].message.content == want.text
        assert got.choices[0].finish_reason == "length"
        assert got.usage.completion_tokens == 24
        assert got.usage.prompt_tokens == len(tiny.encode(CHAT))

    def test_a_stream_says_the_same(self, server: Running, tiny: LLM) -> None:
        chunks = list(
            server.client().chat.completions.create(
                messages=CHAT, **GREEDY, stream=True, stream_options={"include_usage": True}
            )
        )
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == offline(tiny, CHAT).text
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == 24
        assert chunks[-1].metrics["speculative_decoding"]["num_steps"] == len(chunks) - 1

    def test_choices_have_seeds_of_their_own(self, server: Running, tiny: LLM) -> None:
        asked = {"model": "tiny", "max_tokens": 12, "temperature": 0.9, "seed": 5, "n": 2}
        got = server.client().chat.completions.create(messages=CHAT, **asked)
        again = server.client().chat.completions.create(
            messages=CHAT, **asked, extra_body={"paceline": {"speculate": False}}
        )
        want = [offline(tiny, CHAT, max_new_tokens=12, temperature=0.9, seed=seed).text for seed in (5, 6)]
        assert [choice.message.content for choice in got.choices] == want
        assert [choice.message.content for choice in again.choices] == want

    def test_what_is_done_anyway_may_be_asked_for(self, server: Running, tiny: LLM) -> None:
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0.9, "seed": 2**40 + 5}
        more = {"store": False, "modalities": ["text"], "service_tier": "auto"}
        more |= {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "metadata": {"of": "no account"}}
        got = server.client().chat.completions.create(messages=CHAT, **asked, extra_body=more)
        want = offline(tiny, CHAT, max_new_tokens=12, temperature=0.9, seed=5).text
        assert got.choices[0].message.content == want
        assert server.client().completions.create(prompt="abc", best_of=1, **GREEDY).choices

    def test_logprobs(self, server: Running, tiny: LLM) -> None:
        got = server.client().chat.completions.create(messages=CHAT, **GREEDY, logprobs=True, top_logprobs=2)
        want = offline(tiny, CHAT, logprobs=2).logprobs
        entries = got.choices[0].logprobs.content
        assert [entry.logprob for entry in entries] == [known.logprob for known in want]
        assert [entry.top_logprobs[1].logprob for entry in entries] == [known.top[1][1] for known in want]

    def test_stop(self, server: Running, tiny: LLM) -> None:
        text = offline(tiny, CHAT).text
        got = server.client().chat.completions.create(messages=CHAT, **GREEDY, stop=text[4:6])
        assert got.choices[0].message.content == text[: text.index(text[4:6])]
        assert got.choices[0].finish_reason == "stop"

    def test_a_prediction(self, server: Running, tiny: LLM) -> None:
        text = offline(tiny, CHAT, max_new_tokens=60).text
        got = server.client().chat.completions.create(
            messages=CHAT,
            model="tiny",
            temperature=0,
            max_tokens=60,
            prediction={"type": "content", "content": text},
            extra_body={"paceline": {"trace": True, "policy": "fixed:k=8"}},
        )
        assert got.choices[0].message.content == text
        details = got.usage.completion_tokens_details
        assert details.accepted_prediction_tokens > 20  # bytes that are no character are others when written
        trace = got.choices[0].model_extra["paceline"]
        assert len(trace["tokens"]) == len(trace["sources"]) == 60
        assert "prediction" in trace["sources"]
        assert "".join(piece["text"] for piece in trace["pieces"]) == text
        assert sum(record["emitted"] for record in trace["rounds"]) == 60

    def test_earlier_turns_are_not_read_again(self, server: Running) -> None:
        ask = server.client().chat.completions.create
        turns = [{"role": "user", "content": "a long first question, never asked before"}]
        first = ask(messages=turns, **GREEDY)
        turns += [
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "x"},
        ]
        second = ask(messages=turns, **GREEDY)
        assert second.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens
        assert ask(messages=turns, **GREEDY).choices[0].message.content == second.choices[0].message.content

    def test_tools_reach_the_template(self, server: Running) -> None:
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        ask = server.client().chat.completions.create
        with_tools, without = (ask(messages=CHAT, **GREEDY, **more) for more in ({"tools": [tool]}, {}))
        assert with_tools.usage.prompt_tokens > without.usage.prompt_tokens
        none = ask(messages=CHAT, **GREEDY, tools=[tool], tool_choice="none")
        assert none.usage.prompt_tokens == without.usage.prompt_tokens


class TestCompletions:
    def test_several_prompts(self, server: Running, tiny: LLM) -> None:
        prompts = ["abcabc", "xyz"]
        got = server.client().completions.create(prompt=prompts, **GREEDY, echo=True)
        want = [prompt + offline(tiny, prompt, chat=False).text for prompt in prompts]
        assert [choice.text for choice in got.choices] == want
        assert got.usage.prompt_tokens == 9

    def test_token_ids_and_logprobs(self, server: Running, tiny: LLM) -> None:
        got = server.client().completions.create(prompt=[5, 6, 7, 5, 6], **GREEDY, logprobs=3)
        want = offline(tiny, [5, 6, 7, 5, 6], logprobs=3)
        logprobs = got.choices[0].logprobs
        assert logprobs.token_logprobs == [known.logprob for known in want.logprobs]
        assert logprobs.text_offset[0] == 0
        assert len(logprobs.top_logprobs) == len(logprobs.tokens) == 24

    def test_a_stream_with_usage_in_every_chunk(self, server: Running) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = list(server.client().completions.create(prompt="abc", **GREEDY, stream=True, stream_options=options))
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 24

    def test_biases_and_penalties(self, server: Running, tiny: LLM) -> None:
        asked: dict[str, Any] = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
        got = server.client().completions.create(prompt="abc", **GREEDY, **asked, logit_bias={"70": 100})
        want = offline(tiny, "abc", chat=False, **asked, logit_bias={70: 100.0})
        assert got.choices[0].text == want.text
        assert 70 in want.tokens


class TestRefusals:
    @pytest.mark.parametrize(
        ("more", "named"),
        [
            ({"suffix": "x"}, "suffix"),
            ({"best_of": 2}, "best_of"),
            ({"temperature": -1}, "temperature"),
            ({"echo": True, "logprobs": 1}, "echo"),
            ({"paceline": {"drafter": "rest"}}, "paceline.drafter"),
            ({"paceline": {"policy": "nonsense"}}, "nonsense"),
            ({"paceline": {"colour": 1}}, "paceline.colour"),
            ({"prompt": ""}, "prompt"),
            ({"prompt": [999]}, "token id"),
            ({"max_tokens": 600}, "context"),
            ({"min_tokens": 30}, "min_tokens: 30 are more"),
            ({"logit_bias": {"999": 1}}, "token id"),
            ({"paceline": {"policy": "specdec++:predictor=/etc/passwd"}}, "predictor"),
            ({"stop": ["x"] * 17}, "stop: at most 16"),
            ({"stop": ["x" * 2000]}, "stop: a text of it may have 1000 characters"),
            ({"stop": 5}, "stop: must be a text or a list of texts"),
            ({"logprobs": False}, "logprobs: must be a number here"),
            ({"stream_options": {"include_usage": True}}, "stream_options: needs stream"),
            ({"prompt": ["12", 34]}, "prompt: must be a text, token ids, or a list"),
            ({"prompt": [True]}, "prompt: must be"),
            ({"max_tokens": "5"}, "max_tokens: Input should be a valid integer"),
            ({"max_tokens": True}, "max_tokens: "),
            ({"n": "2"}, "n: "),
            ({"seed": True}, "seed: "),
            ({"temperature": False}, "temperature: "),
            ({"stream": "yes"}, "stream: "),
            ({"logit_bias": {"x": 1}}, "logit_bias: 'x' is no token id"),
            ({"logit_bias": {"5": 101}}, "logit_bias: the number of token 5 must lie in -100 .. 100"),
            ({"logit_bias": [5]}, "logit_bias: must be an object"),
            ({"stop": [""]}, "stop: a text of it is empty"),
            ({"repetition_penalty": 1e7}, "repetition_penalty: "),
            ({"max_tokens": None, "min_tokens": 600}, "min_tokens: 600 are more"),
            ({"prompt": [999], "echo": True}, "prompt: token id 999"),
            ({"service_tier": "flex"}, "service_tier: "),
        ],
    )
    def test_the_field_is_named(self, server: Running, more: dict[str, Any], named: str) -> None:
        answer = server.post("/v1/completions", json={"prompt": "abc", **GREEDY, **more})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert named in error["message"]
        field, colon, _ = error["message"].partition(": ")
        of_limits = "max_tokens" if "context" in named else None  # which clients know by their words
        assert error["param"] == (field if colon else of_limits)

    def test_a_text_that_is_too_long_is_told_as_clients_know_it(self, server: Running) -> None:
        answer = server.post("/v1/completions", json={"prompt": "abc", **GREEDY, "max_tokens": 600})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 512 tokens" in error["message"]

    @pytest.mark.parametrize(
        ("more", "named"),
        [
            ({"tool_choice": "required"}, "tool_choice"),
            ({"top_logprobs": 2}, "top_logprobs"),
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "user"}]}, "messages.0: content is missing"),
            ({"messages": [{"role": "user", "content": None}]}, "content is missing"),
            ({"messages": [{"role": "user", "content": []}]}, "messages.0.content: must be a text or a list of parts"),
            ({"messages": [{"role": "assistant"}]}, "content is missing"),
            ({"tool_choice": "f"}, "tool_choice: must be none, auto, required or .*, not 'f'"),
            ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: Field required"),
            (
                {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
                "messages.0.content.0",
            ),
            ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}, "tool_calls"),
            ({"prediction": {"type": "content", "content": "a" * 600}}, "prediction: its 600 tokens"),
            ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.function: Field required"),
            ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos: response_format and"),
            (
                {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
                "response_format: ",
            ),
        ],
    )
    def test_of_chats(self, server: Running, more: dict[str, Any], named: str) -> None:
        with pytest.raises(openai.BadRequestError, match=named):
            server.client().chat.completions.create(**{"messages": CHAT, **GREEDY}, extra_body=more)

    def test_what_is_too_long_is_named(self, server: Running) -> None:
        for field in ("max_tokens", "max_completion_tokens"):
            answer = server.post("/v1/chat/completions", json={"messages": CHAT, field: 600})
            assert answer.json()["error"]["param"] == field
        long = [{"role": "user", "content": "a" * 600}]
        assert server.post("/v1/chat/completions", json={"messages": long}).json()["error"]["param"] == "messages"
        assert server.post("/v1/completions", json={"prompt": "a" * 600}).json()["error"]["param"] == "prompt"
        assert server.post("/detokenize", json={"tokens": [999]}).json()["error"]["param"] == "tokens"

    def test_another_model(self, server: Running) -> None:
        client = server.client()
        for ask in (client.models.retrieve, partial(client.completions.create, prompt="a")):
            with pytest.raises(openai.NotFoundError) as refused:
                ask(model="gpt")
            assert (refused.value.param, refused.value.code) == ("model", "model_not_found")

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/chat/completions", {"messages": [0] * 300_000}),
            ("/v1/chat/completions", {"messages": CHAT, "tools": [{}] * 200_000}),
            ("/v1/completions", {"prompt": "a", "logit_bias": {str(n): "x" for n in range(100_000)}}),
            ("/v1/completions", {"prompt": "a"} | {f"x{n}": 0 for n in range(100_000)}),
            ("/detokenize", {"tokens": [-1] * 300_000}),
        ],
        ids=["messages", "tools", "biases", "fields", "tokens"],
    )
    def test_of_many_faults_one_is_looked_for(self, path: str, body: dict[str, Any]) -> None:
        """All of them would hold everybody up for a minute, and take gigabytes."""
        form = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}.get(path, DetokenizeRequest)
        with pytest.raises(ValidationError) as refused:
            form.model_validate(body)
        assert refused.value.error_count() < 4

    def test_more_answers_than_there_is_room_for(self, server: Running) -> None:
        """Before any of the prompts is read."""
        answer = server.post("/v1/completions", json={"prompt": ["a"] * 2_000})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "n"

    @pytest.mark.parametrize(
        "body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"{" * 5000, b'{"prompt": 1e999}']
    )
    def test_hostile_bodies(self, server: Running, body: bytes) -> None:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            answer = server.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400
            assert answer.json()["error"]["type"] == "invalid_request_error"

    def test_no_json(self, server: Running) -> None:
        answer = server.post("/v1/completions", content=b'{"a" 1', headers={"content-type": "application/json"})
        error = answer.json()["error"]
        assert error["message"] == "the body is no JSON: Expecting ':' delimiter (character 5)"
        assert error["param"] is None

    def test_a_body_that_is_not_called_json(self, server: Running) -> None:
        """As `curl -d` sends it."""
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            for kind in ({}, {"content-type": "application/x-www-form-urlencoded"}):
                answer = server.post(path, content=b'{"prompt": "abc"}', headers=kind)
                assert answer.status_code == 400
                assert answer.json()["error"]["message"].endswith("sent with the header content-type: application/json")

    @pytest.mark.parametrize("field", ["prompt", "model", "user", "stop", "\\ud800"])
    def test_half_a_surrogate_pair(self, server: Running, field: str) -> None:
        body = f'{{"prompt": "a", "{field}": "\\ud800"}}'.encode()
        answer = server.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert "surrogate" in answer.json()["error"]["message"]

    def test_bodies_that_are_too_long(self, server: Running) -> None:
        long = json.dumps({"prompt": "a" * 30_000}).encode()
        assert server.post("/v1/completions", content=long).status_code == 413
        assert server.post("/v1/completions", content=iter([long])).status_code == 413  # in chunks


class TestTheRest:
    def test_models(self, server: Running) -> None:
        [model] = server.client().models.list().data
        assert model.id == "tiny"
        assert model.model_extra["drafters"] == ["prompt-lookup", "none", "suffix"]

    def test_one_model(self, server: Running) -> None:
        assert server.client().models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.NotFoundError):
            server.client().models.retrieve("a/b")

    def test_answers_have_names_of_their_own(self, server: Running) -> None:
        asked = {"json": {"prompt": "a", **GREEDY}, "headers": {"x-request-id": "same"}}
        assert len({server.post("/v1/completions", **asked).json()["id"] for _ in range(2)}) == 2

    @pytest.mark.parametrize("path", ["/", "/health", "/ready"])
    def test_heads(self, server: Running, path: str) -> None:
        assert httpx.head(server.url + path).status_code == 200

    def test_tokens_there_and_back(self, server: Running, tiny: LLM) -> None:
        tokens = server.post("/tokenize", json={"prompt": "äbc"}).json()["tokens"]
        assert server.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "äbc"}
        assert server.post("/tokenize", json={"messages": CHAT}).json()["tokens"] == tiny.encode(CHAT)
        for path, asked in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": tokens})):
            assert server.post(path, json={"model": "another", **asked}).status_code == 404
        bare = server.post("/tokenize", json={"messages": CHAT, "add_special_tokens": False})
        assert (bare.status_code, "add_special_tokens" in bare.text) == (400, True)
        unused = {"speculate": False, "policy": "nonsense"}
        assert server.post("/v1/completions", json={"prompt": "a", "paceline": unused}).status_code == 400

    def test_state_and_metrics(self, server: Running) -> None:
        server.client().completions.create(prompt="abcabc", **GREEDY)
        assert server.get("/health").status_code == server.get("/ready").status_code == 200
        assert [slot["id"] for slot in server.get("/slots").json()] == [0, 1, 2]
        text = server.get("/metrics").text
        for name in ("num_requests_running", "generation_tokens_total", "time_to_first_token_seconds_bucket"):
            assert f"vllm:{name}{{" in text

    def test_the_page(self, server: Running) -> None:
        assert "<title>paceline" in server.get("/").text
        assert server.get("/page.js").status_code == server.get("/page.css").status_code == 200

    def test_headers(self, server: Running) -> None:
        answer = server.get("/health", headers={"x-request-id": "mine", "origin": "http://page"})
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["access-control-allow-origin"] == "http://page"
        assert server.get("/health", headers={"x-request-id": "no good"}).headers["x-request-id"] != "no good"
