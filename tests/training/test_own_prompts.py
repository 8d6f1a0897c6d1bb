"""Prompts that a model makes up itself."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

import paceline
from helpers import one_thread  # noqa: F401
from paceline.api import Output
from paceline.decoding.stats import Stats
from paceline.errors import DataError, OptionError
from paceline.training.data.own_prompts import _ended, own_prompts, user_place
from tiny import byte_tokenizer, small_llama


@pytest.fixture(scope="module")
def llm() -> paceline.LLM:
    return paceline.load(small_llama(initializer_range=0.05), drafter="none", tokenizer=byte_tokenizer())


@pytest.fixture(scope="module")
def with_token() -> paceline.LLM:
    """One whose messages end with a token of its own, the text's end with another."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>\n{% endfor %}"
    model = small_llama(initializer_range=0.05, vocab_size=258)
    return paceline.load(model, drafter="none", tokenizer=tokenizer)


def test_around_a_message(tiny_tokenizer: PreTrainedTokenizerFast, with_token: paceline.LLM) -> None:
    before, end, after = user_place(tiny_tokenizer)
    assert (tiny_tokenizer.decode(before), end, after) == ("user: ", None, "\n")
    assert user_place(with_token.tokenizer)[1:] == (257, "<|im_end|>\n")
    late = byte_tokenizer()
    late.chat_template = "user: {{ messages[0]['content'] }}{% if add_generation_prompt %} ASSISTANT:{% endif %}"
    assert user_place(late)[1:] == (None, " ASSISTANT:")


@pytest.mark.parametrize("kind", ["llm", "with_token"])
def test_messages_end_where_the_template_ends_them(kind: str, request: pytest.FixtureRequest) -> None:
    llm = request.getfixturevalue(kind)
    found = list(own_prompts(llm, 6, max_new_tokens=200, batch=4))
    assert len(set(found)) == 6
    assert all(text == text.strip() and text for text in found)
    assert kind == "with_token" or not any("\n" in text for text in found)
    assert any(len(text) > 20 for text in found)
    assert list(own_prompts(llm, 4, max_new_tokens=200, batch=3)) == found[:4]  # whatever stands beside them
    assert not set(own_prompts(llm, 6, max_new_tokens=200, seed=1)) & set(found)


def test_the_end_of_the_text_is_no_end_of_a_message(llm: paceline.LLM, with_token: paceline.LLM) -> None:
    def ended(llm: paceline.LLM, last: int, reason: str) -> bool:
        return _ended(Output("text", [5, last], reason, Stats(3)), user_place(llm.tokenizer))

    assert [ended(with_token, last, "eos") for last in (257, 256)] == [True, False]
    assert [ended(llm, 10, reason) for reason in ("stop", "eos", "length")] == [True, False, False]


def test_what_cannot_be(llm: paceline.LLM, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="temperature must be > 0"):
        next(own_prompts(llm, 1, temperature=0.0))
    with pytest.raises(DataError, match="in 8 attempts the model wrote no message"):
        list(own_prompts(llm, 2, max_new_tokens=1))
    for template, says in ((None, "no chat template"), ("{{ messages[0]['content'] }}", "does not show")):
        tokenizer = byte_tokenizer(chat=False)
        tokenizer.chat_template = template
        other = paceline.load(llm.target.model, drafter="none", tokenizer=tokenizer)
        with pytest.raises(OptionError, match=says):
            list(islice(own_prompts(other, 1), 1))
