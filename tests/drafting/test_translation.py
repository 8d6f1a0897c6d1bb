"""Texts and drafts in the tokens of a draft model with another tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from paceline.drafting.translation import MOST, TranslatedText, Translation
from paceline.errors import TokenizerMismatch
from paceline.targets.tokenizers import token_texts
from tiny import EOS, LETTERS, byte_tokenizer, pair_tokenizer

TEXTS = st.text(st.sampled_from("abc .\n é你🚴"), max_size=12)
SPACE = " "


def of_spaces() -> PreTrainedTokenizerFast:
    """As sentencepiece's: words begin with a mark, other bytes have tokens of their own, and texts begin with one."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁ab"]
    merges = [("▁", "a"), ("▁a", "b")]
    core = Tokenizer(
        models.BPE({name: at for at, name in enumerate(names)}, merges, byte_fallback=True, unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    core.decoder = decoders.Sequence([decoders.Replace("▁", SPACE), decoders.ByteFallback(), decoders.Fuse()])
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    made = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **roles)
    made.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return made


def of_pairs() -> PreTrainedTokenizerFast:
    return pair_tokenizer(LETTERS[::-1], [("a", "b"), ("Ġ", "a"), ("Ġ", "Ġ")], "</s>")


def translation(target: PreTrainedTokenizerBase, drafter: PreTrainedTokenizerBase) -> Translation:
    return Translation(target, drafter, (len(target), len(drafter)))


KINDS = {"bytes": byte_tokenizer, "pairs": of_pairs, "spaces": of_spaces}


@pytest.mark.parametrize("drafter", KINDS)
@pytest.mark.parametrize("target", KINDS)
@given(text=TEXTS, more=TEXTS)
def test_the_text_is_the_same(target: str, drafter: str, text: str, more: str) -> None:
    """However it grows, and what was translated stays."""
    ours, other = KINDS[target](), KINDS[drafter]()
    ids = ours.encode(text, add_special_tokens=False)
    translated = TranslatedText(ids, found := translation(ours, other))
    assert other.decode(translated.ids[len(found.start) :]) == ours.decode(ids)
    before = list(translated.ids)
    ids += ours.encode(more, add_special_tokens=False)
    translated.read(ids)
    assert translated.ids[: len(before)] == before
    assert other.decode(translated.ids[len(found.start) :]) == ours.decode(ids)
    for tokens in range(len(ids) + 1):
        again = TranslatedText(ids[:tokens], found)
        assert translated.place(tokens) == len(again.ids)
        assert translated.ids[: translated.place(tokens)] == again.ids


@pytest.mark.parametrize("drafter", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_what_can_be_drafted_is_in_both(target: str, drafter: str) -> None:
    ours, other = KINDS[target](), KINDS[drafter]()
    found, own, theirs = translation(ours, other), token_texts(ours), token_texts(other)
    assert len(found.tokens) == len(set(found.tokens)) == len(set(found.columns)) > 4
    for token, column in zip(found.tokens, found.columns, strict=True):
        assert found.of(token) == [column]
        assert own[token] == theirs[column] or (token, column) == (ours.eos_token_id, other.eos_token_id)
    assert (ours.eos_token_id, other.eos_token_id) in zip(found.tokens, found.columns, strict=True)


def test_bytes_of_words_and_of_bytes() -> None:
    """Sentencepiece has two tokens for "a": the one that tokenizers choose counts."""
    found = translation(byte_tokenizer(), other := of_spaces())
    [ours] = byte_tokenizer().encode("a")
    assert found.of(ours) == [other.get_vocab()["a"]]
    [ours] = byte_tokenizer().encode("\n")
    assert found.of(ours) == [other.get_vocab()["<0x0A>"]]


def test_texts_begin_as_the_draft_models_do() -> None:
    found = translation(byte_tokenizer(), other := of_spaces())
    assert TranslatedText([], found).ids == [other.bos_token_id]
    back = translation(other, other)
    ids = other("ab").input_ids
    assert TranslatedText(ids, back).ids[0] == other.bos_token_id
    assert TranslatedText(ids, back).ids.count(other.bos_token_id) == 1
    assert TranslatedText(ids[1:], back).ids.count(other.bos_token_id) == 1


def test_long_tokens_and_those_that_are_nothing() -> None:
    ours = byte_tokenizer()
    ours.add_tokens(["a" * 20, "<a-b-c>"])
    few = pair_tokenizer("ab", [], EOS)
    found = translation(ours, few)
    [word] = ours.encode("a" * 20)
    assert found.of(word) == few.encode("a" * MOST)
    [nothing] = ours.encode("z")
    assert found.of(nothing) == [0]
    assert found.of(10_000) == [0]  # padding of an output matrix
    assert few.decode(found.of(*ours.encode("<a-b-c>"))) == "ab"
    assert translation(ours, of_spaces()).of(10_000) == [of_spaces().unk_token_id]
    assert of_pairs().decode(translation(ours, of_pairs()).of(10_000)) == SPACE


def test_ids_that_a_model_has_no_logits_for_are_not_drafted() -> None:
    tokenizer = byte_tokenizer()
    assert Translation(tokenizer, of_pairs(), (100, 1000)).tokens == list(range(100))
    assert max(Translation(tokenizer, of_pairs(), (1000, 100)).columns) == 99


def test_what_cannot_be_compared() -> None:
    core = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]")
    for pair in ((words, byte_tokenizer()), (byte_tokenizer(), words)):
        with pytest.raises(TokenizerMismatch, match="no way is known"):
            translation(*pair)
    with pytest.raises(TokenizerMismatch, match="no token in common"):
        translation(pair_tokenizer("ab", [], "<x>"), Stripped(pair_tokenizer("cd", [], "<y>")))


class Stripped:
    """A tokenizer without an end."""

    eos_token_id = None

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer

    def __getattr__(self, name: str) -> object:
        return getattr(self.tokenizer, name)

    def __len__(self) -> int:
        return len(self.tokenizer)
