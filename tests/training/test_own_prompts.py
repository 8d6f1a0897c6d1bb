"""Prompts that a model makes up itself."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

import paceline
from helpers import one_thread  # noqa: F401
from paceline.errors import DataError, OptionError
from paceline.training.own_prompts import around_user, own_prompts
from tiny import byte_tokenizer, small_llama


@pytest.fixture(scope="module")
def llm() -> paceline.LLM:
    return paceline.load(small_llama(initializer_range=0.05), drafter="none", tokenizer=byte_tokenizer())


def test_around_a_message(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    before, end = around_user(tiny_tokenizer)
    assert tiny_tokenizer.decode(before) == "user: "
    assert tiny_tokenizer.decode([end]) == "\n"


def test_messages_end_where_the_template_ends_them(llm: paceline.LLM) -> None:
    found = list(own_prompts(llm, 6, max_new_tokens=200, batch=4))
    assert len(set(found)) == 6
    assert all(text == text.strip() and text and "\n" not in text for text in found)
    assert any(len(text) > 20 for text in found)
    assert list(own_prompts(llm, 4, max_new_tokens=200, batch=3)) == found[:4]  # whatever stands beside them
    assert not set(own_prompts(llm, 3, max_new_tokens=200, seed=1000)) & set(found)


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
