"""Answers that must look like something; the official client's structured outputs are the oracle."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pydantic
import pytest

from paceline import LLM
from paceline.errors import OptionError
from serve.conftest import Running

CHAT: Any = [{"role": "user", "content": "abcabcabc"}]
ASKED: Any = {"model": "tiny", "temperature": 0, "max_tokens": 120}


class Wheel(pydantic.BaseModel):
    size: Literal["big", "small"]


class Bicycle(pydantic.BaseModel):
    name: Literal["abc", "xyz"]
    wheels: list[Wheel] = pydantic.Field(max_length=2)


RIDE = {
    "properties": {"to": {"$ref": "#/$defs/x"}},
    "required": ["to"],
    "additionalProperties": False,
    "$defs": {"x": {"enum": ["a", "b"]}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "ride", "strict": True, "parameters": RIDE}},
    {"type": "function", "function": {"name": 'say "é"', "parameters": {"enum": [{"at": 1}]}}},
]


class TestJson:
    def test_the_client_parses_it(self, server: Running) -> None:
        got = server.client().chat.completions.parse(messages=CHAT, response_format=Bicycle, **ASKED)
        assert got.choices[0].message.parsed.name in ("abc", "xyz")
        assert got.choices[0].finish_reason == "stop"

    def test_a_stream_of_it(self, server: Running) -> None:
        asked = ASKED | {"temperature": 1, "seed": 2}
        with server.client().chat.completions.stream(messages=CHAT, response_format=Bicycle, **asked) as stream:
            got = stream.get_final_completion()
        again = server.client().chat.completions.parse(messages=CHAT, response_format=Bicycle, **asked)
        assert got.choices[0].message.parsed == again.choices[0].message.parsed

    def test_as_offline_in_a_batch_with_others(self, server: Running, tiny: LLM) -> None:
        format_ = {"type": "json_schema", "json_schema": {"name": "bicycle", "schema": Bicycle.model_json_schema()}}

        def ask(seed: int) -> str:
            drafter = ["suffix", "none", "prompt-lookup"][seed % 3]
            more = {"seed": seed, "temperature": seed % 2, "paceline": {"drafter": drafter}}
            more |= {"response_format": format_} if seed < 6 else {}
            body = ASKED | more | {"messages": CHAT}
            answer = server.post("/v1/chat/completions", json=body).json()
            return str(answer["choices"][0]["message"]["content"])

        with ThreadPoolExecutor(4) as pool:
            got = list(pool.map(ask, range(8)))
        for seed, text in enumerate(got):
            schema = Bicycle.model_json_schema() if seed < 6 else None
            sampling = {"temperature": seed % 2, "seed": seed, "json_schema": schema}
            assert text == tiny.generate(CHAT, max_new_tokens=120, **sampling).text

    def test_any_object(self, server: Running) -> None:
        trace = {"paceline": {"trace": True, "policy": "fixed:k=4"}}
        got = server.client().chat.completions.create(
            messages=CHAT, response_format={"type": "json_object"}, extra_body=trace, logit_bias={"2": 20}, **ASKED
        )
        assert got.choices[0].message.content.startswith("{")
        assert "grammar" in got.choices[0].model_extra["paceline"]["sources"]


class TestCalls:
    @pytest.mark.parametrize("parallel", [True, False])
    def test_required(self, server: Running, parallel: bool) -> None:
        got = server.client().chat.completions.create(
            messages=CHAT, tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel, **ASKED
        )
        assert got.choices[0].finish_reason == "tool_calls"
        for call in got.choices[0].message.tool_calls:
            arguments = json.loads(call.function.arguments)
            if call.function.name == "ride":
                assert arguments["to"] in ("a", "b")
            else:
                assert (call.function.name, arguments) == ('say "é"', {"at": 1})
        assert parallel or len(got.choices[0].message.tool_calls) == 1

    @pytest.mark.parametrize("name", ["ride", 'say "é"'])
    def test_named(self, server: Running, name: str) -> None:
        choice: Any = {"type": "function", "function": {"name": name}}
        got = server.client().chat.completions.create(messages=CHAT, tools=TOOLS, tool_choice=choice, **ASKED)
        assert got.choices[0].message.content is None
        assert {call.function.name for call in got.choices[0].message.tool_calls} == {name}


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "Invalid type"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens"),
        ({"response_format": {"type": "json_object"}, "tools": TOOLS[1:]}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}, "tools": TOOLS}, "'no'"),
        ({"tools": TOOLS}, "strict"),
    ],
)
def test_refusals(server: Running, more: dict[str, Any], named: str) -> None:
    answer = server.post("/v1/chat/completions", json=ASKED | {"messages": CHAT} | more)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]


def test_a_grammar_that_cannot_be_followed_is_the_clients(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(state: Any) -> None:
        state.error = OptionError("the grammar cannot be followed: too complex")

    monkeypatch.setattr("paceline.decoding.grammar.GrammarState._note_error", broken)
    answer = server.post(
        "/v1/chat/completions", json=ASKED | {"messages": CHAT, "response_format": {"type": "json_object"}}
    )
    assert answer.status_code == 400
    assert "too complex" in answer.json()["error"]["message"]
