"""What a round gave, as a choice of an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from decoding.test_text import PIECES
from paceline.decoding.logprobs import Logprob
from paceline.decoding.text import Piece, TextStream
from paceline.serve.answers import AnswerChoice, TokenTexts, chat_logprobs, completion_logprobs
from paceline.serve.protocol import Message
from paceline.serve.tools import ToolText
from paceline.serve.worker import News
from tiny import byte_tokenizer

BYTES = byte_tokenizer()
TEXTS = TokenTexts(BYTES)
SURE = Logprob(-1.0, [])


def news(tokens: list[int], text: str, finish_reason: str | None = None) -> News:
    pieces = [Piece(text, "target")] if text else []
    return News(0, tokens, ["target"] * len(tokens), pieces, [SURE] * len(tokens), None, None, [], finish_reason)


def test_offsets_of_tokens_whose_text_is_held_back() -> None:
    """As the possible beginning of a stop string."""
    choice, offsets = AnswerChoice(0, chat=False, tools=None, logprobs=True, trace=False), list[int]()
    for token, text in zip(BYTES.encode("axb"), ("a", "", "xb"), strict=True):
        offsets += choice.delta(news([token], text), TEXTS)["logprobs"]["text_offset"]
    assert offsets == [0, 1, 2]


def test_tokens_that_are_parts_of_a_character() -> None:
    """Each has a name and bytes of its own, though no text."""
    first, second = BYTES.encode("é", add_special_tokens=False)
    logprobs = [Logprob(-1.0, [(first, -1.0), (second, -2.0)]), SURE]
    plain = completion_logprobs(TEXTS, [first, second], logprobs, 3)
    assert plain["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert plain["top_logprobs"] == [{"bytes:\\xc3": -1.0, "bytes:\\xa9": -2.0}, {"bytes:\\xa9": -1.0}]
    assert plain["text_offset"] == [3, 4]
    chat = chat_logprobs(TEXTS, [first, second], logprobs)["content"]
    assert bytes(byte for entry in chat for byte in entry["bytes"]).decode() == "é"
    assert [entry["token"] for entry in chat] == plain["tokens"]


def test_a_chosen_token_is_among_the_likeliest() -> None:
    """Though it is not one of them, or none was asked for."""
    chosen, other = BYTES.encode("ab", add_special_tokens=False)
    told = completion_logprobs(TEXTS, [chosen, chosen], [Logprob(-3.0, [(other, -0.1)]), Logprob(-3.0, [])], 0)
    assert told["top_logprobs"] == [{"a": -3.0, "b": -0.1}, {"a": -3.0}]


def test_special_tokens_take_no_place_in_the_text() -> None:
    a, b = BYTES.encode("ab", add_special_tokens=False)
    end = BYTES.eos_token_id
    assert completion_logprobs(TEXTS, [a, end, b, end, a], [SURE] * 5, 0)["text_offset"] == [0, 1, 1, 2, 2]


def test_of_tokens_with_one_text_the_likelier_is_told() -> None:
    ids = PIECES.convert_tokens_to_ids(["▁a", "▁a"])
    told = completion_logprobs(TokenTexts(PIECES), ids[:1], [Logprob(-1.0, [(ids[0], -1.0), (ids[1], -2.0)])], 0)
    assert told["top_logprobs"] == [{" a": -1.0}]


def test_a_call_that_is_cut_says_so() -> None:
    whole = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for text, ended, reason in ((whole, "eos", "tool_calls"), (whole + '\n<tool_call>{"na', "length", "length")):
        choice = AnswerChoice(0, chat=True, tools=ToolText(), logprobs=False, trace=False)
        delta = choice.delta(news([1], text, ended), TEXTS)
        assert delta["finish_reason"] == reason
        assert len(delta["delta"]["tool_calls"]) == 1


def test_arguments_are_json() -> None:
    """What Python reads and JSON does not know is no call."""
    for number in ("-1e999", "NaN", "Infinity"):
        tools = ToolText()
        text = f'<tool_call>{{"name": "f", "arguments": {{"a": {number}}}}}</tool_call>'
        assert tools.push(text) + tools.flush() == text
        assert not tools.calls


def test_ends_within_a_string_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0

    def read(text: str) -> Any:
        nonlocal looked
        looked += 1
        return json.loads(text)

    monkeypatch.setattr("paceline.serve.tools.read_json", read)
    call = {"name": "f", "arguments": {"a": "x</tool_call>" * 50}}
    text, tools = f"<tool_call>{json.dumps(call)}</tool_call>" * 2, ToolText()
    assert "".join(tools.push(text[at : at + 4]) for at in range(0, len(text), 4)) == ""
    assert [made["function"]["arguments"] for made in tools.calls] == [json.dumps(call["arguments"])] * 2
    assert looked <= 2 * (50 + 2)


def test_tokens_keep_their_spaces() -> None:
    """Though the tokenizer leaves out the one that a text begins with."""
    ids = PIECES.convert_tokens_to_ids(["b", "▁a"])
    logprobs = [SURE, Logprob(-1.0, [(ids[1], -1.0), (PIECES.convert_tokens_to_ids("a"), -2.0)])]
    chat = chat_logprobs(TokenTexts(PIECES), ids, logprobs)["content"]
    assert [entry["token"] for entry in chat] == ["b", " a"]
    assert [entry["token"] for entry in chat[1]["top_logprobs"]] == [" a", "a"]
    plain = completion_logprobs(TokenTexts(PIECES), ids, logprobs, 3)
    assert plain["tokens"] == ["b", " a"]
    assert plain["top_logprobs"][1] == {" a": -1.0, "a": -2.0}
    assert plain["text_offset"] == [3, 4]


def test_a_completion_keeps_the_space_after_its_prompt() -> None:
    before, after = (PIECES.convert_tokens_to_ids(words) for words in (["a", "b"], ["▁a", ".", "▁a"]))
    stream = TextStream(PIECES)
    stream.continues(before)
    assert "".join(map(stream.push, after)) + stream.flush() == " a. a" == stream.text


def test_arguments_reach_the_template_as_an_object() -> None:
    texts = ("[1]", "no JSON", "[" * 5000 + "]" * 5000)
    for written, read in (('{"a": 1}', {"a": 1}), *zip(texts, texts, strict=True)):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": written}}
        plain = Message(role="assistant", content="", tool_calls=[call]).plain()
        assert plain["tool_calls"][0]["function"] == {"name": "f", "arguments": read}
        assert call["function"]["arguments"] == written  # type: ignore[index]
