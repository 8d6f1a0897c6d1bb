"""Tokenizers are compared by what they do."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paceline.errors import TokenizerMismatch
from paceline.targets.tokenizers import require_tokenizer, same_tokenizer, token_texts
from tiny import EOS, byte_tokenizer


def bpe(words: list[str], merges: list[tuple[str, str]], split: bool = True) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({word: index for index, word in enumerate(alphabet + words)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    return PreTrainedTokenizerFast(tokenizer_object=core)


def test_same() -> None:
    assert same_tokenizer(byte_tokenizer(), byte_tokenizer())
    assert same_tokenizer(byte_tokenizer(chat=True), byte_tokenizer(chat=False))  # the template is not the tokens'


def test_one_token_more() -> None:
    other = byte_tokenizer()
    other.add_tokens(["<extra>"])
    assert not same_tokenizer(byte_tokenizer(), other)


def test_same_size_other_ids() -> None:
    """Vocabulary sizes that agree say nothing."""
    one, other = bpe(["he", "wo"], [("h", "e"), ("w", "o")]), bpe(["wo", "he"], [("h", "e"), ("w", "o")])
    assert len(one) == len(other)
    assert not same_tokenizer(one, other)


def test_same_vocabulary_other_splits() -> None:
    words = ["He", "el", "Hel"]
    assert not same_tokenizer(bpe(words, [("H", "e"), ("e", "l")]), bpe(words, [("e", "l"), ("H", "e")]))


def test_none() -> None:
    assert require_tokenizer(tokenizer := byte_tokenizer(), "x") is tokenizer
    with pytest.raises(TokenizerMismatch, match="x: both models need their tokenizers"):
        require_tokenizer(None, "x")


def test_what_tokens_are_in_a_text() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["é ▁"])
    texts = token_texts(tokenizer)
    assert sorted(text for text in texts.values() if len(text) == 1) == [bytes([byte]) for byte in range(256)]
    assert texts[tokenizer.eos_token_id] == EOS
    assert texts[257] == "é ▁".encode()
