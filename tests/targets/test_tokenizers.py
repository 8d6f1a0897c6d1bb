"""Tokenizers are compared by what they do."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paceline.errors import TokenizerMismatch
from paceline.targets.tokenizers import check_same_tokenizer
from tiny import byte_tokenizer


def bpe(words: list[str], merges: list[tuple[str, str]], split: bool = True) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({word: index for index, word in enumerate(alphabet + words)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    return PreTrainedTokenizerFast(tokenizer_object=core)


def test_same() -> None:
    check_same_tokenizer(byte_tokenizer(), byte_tokenizer())
    check_same_tokenizer(byte_tokenizer(chat=True), byte_tokenizer(chat=False))  # the template is not the tokens'


def test_one_token_more() -> None:
    other = byte_tokenizer()
    other.add_tokens(["<extra>"])
    with pytest.raises(TokenizerMismatch, match="differs from the target's in 1 of 257 tokens"):
        check_same_tokenizer(byte_tokenizer(), other)


def test_same_size_other_ids() -> None:
    """Vocabulary sizes that agree say nothing."""
    one, other = bpe(["he", "wo"], [("h", "e"), ("w", "o")]), bpe(["wo", "he"], [("h", "e"), ("w", "o")])
    assert len(one) == len(other)
    with pytest.raises(TokenizerMismatch, match="in 2 of 258 tokens"):
        check_same_tokenizer(one, other)


def test_same_vocabulary_other_splits() -> None:
    words = ["He", "el", "Hel"]
    one, other = bpe(words, [("H", "e"), ("e", "l")]), bpe(words, [("e", "l"), ("H", "e")])
    with pytest.raises(TokenizerMismatch, match="splits text differently"):
        check_same_tokenizer(one, other)


def test_unknown_tokenizers() -> None:
    for pair in [(None, byte_tokenizer()), (byte_tokenizer(), None), (None, None)]:
        with pytest.raises(TokenizerMismatch, match="need their tokenizers"):
            check_same_tokenizer(*pair)
