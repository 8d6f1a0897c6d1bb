"""Streamed text: whole characters, in the order of decoding all at once, cut before stop strings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paceline.decoding.text import TextStream
from tiny import byte_tokenizer

BYTES = byte_tokenizer()
ALPHABET = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def sentence_pieces() -> PreTrainedTokenizerFast:
    """Words with their spaces as in Llama 2, everything else as bytes; the first space is stripped in decoding."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "a", "b", "▁ab", ".", "▁.", "'", "t"]
    core = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)


PIECES = sentence_pieces()


def byte_ids(text: str | bytes) -> list[int]:
    """One token a byte."""
    raw = text.encode() if isinstance(text, str) else text
    table = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if isinstance(text, str):
        return [ALPHABET[char] for piece, _ in table.pre_tokenize_str(text) for char in piece]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [ALPHABET[chr(byte) if byte in printable else chr(256 + others.index(byte))] for byte in raw]


def streamed(ids: list[int], stop: tuple[str, ...] = (), tokenizer: PreTrainedTokenizerFast = BYTES) -> list[str]:
    stream = TextStream(tokenizer, stop)
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.flush())
    assert "".join(pieces) == stream.text
    return pieces


@given(st.text(max_size=20))
def test_whole_characters(text: str) -> None:
    pieces = streamed(byte_ids(text))
    assert "".join(pieces) == text
    for piece in pieces:
        assert "\ufffd" not in piece or "\ufffd" in text


@given(st.binary(max_size=12))
def test_any_bytes(raw: bytes) -> None:
    """Also those that are no text: as decoding all at once has them."""
    ids = byte_ids(raw)
    assert "".join(streamed(ids)) == BYTES.decode(ids) == raw.decode(errors="replace")


@given(st.lists(st.sampled_from(["a", "b", "▁", "▁a", "▁ab", ".", "▁.", "'", "t", "é", "🚴", "你"]), max_size=12))
def test_sentence_pieces(words: list[str]) -> None:
    vocabulary = PIECES.get_vocab()
    ids = []
    for word in words:
        ids += [vocabulary[word]] if word in vocabulary else [vocabulary[f"<0x{b:02X}>"] for b in word.encode()]
    pieces = streamed(ids, tokenizer=PIECES)
    assert "".join(pieces) == PIECES.decode(ids) == "".join(words).replace("▁", " ").removeprefix(" ")
    assert not any("\ufffd" in piece for piece in pieces)


def test_characters_come_when_they_are_complete() -> None:
    assert streamed(byte_ids("é🚴!")) == ["", "é", "", "", "", "🚴", "!", ""]
    assert streamed(byte_ids(b"\xf0\x9f\x9aA")) == ["", "", "", "\ufffdA", ""]
    assert streamed(byte_ids(b"A\xf0\x9f")) == ["A", "", "", "\ufffd"]


def test_special_tokens_are_left_out() -> None:
    a, b = byte_ids("ab")
    assert streamed([a, 256, b]) == ["a", "", "b", ""]


@given(
    st.text("abé", max_size=14),
    st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings(text: str, stop: list[str]) -> None:
    """Stops at the first token that completes one; nothing of it is ever sent."""
    ids = byte_ids(text)
    stream = TextStream(BYTES, stop)
    sent, want = "", text
    for count, token in enumerate(ids, start=1):
        sent += stream.push(token)
        seen = BYTES.decode(ids[:count]).rstrip("\ufffd")
        found = [seen.find(string) for string in stop if string in seen]
        assert stream.stopped == bool(found)
        if found:
            want = seen[: min(found)]
            break
        assert seen.startswith(sent)
        held = seen[len(sent) :]
        assert held == "" or any(string.startswith(held) for string in stop)
    sent += stream.flush()
    assert sent == stream.text == want
    assert stream.flush() == ""


@pytest.mark.parametrize("stop", [("xyz",), ("x", "yz"), ("zz", "xy")])
def test_what_may_begin_a_stop_is_held_back(stop: tuple[str, ...]) -> None:
    pieces = streamed(byte_ids("axyb"), stop)
    assert "".join(pieces) == ("axyb" if stop == ("xyz",) else "a")
    if stop == ("xyz",):
        assert pieces == ["a", "", "", "xyb", ""]


def test_stop_over_the_end_of_a_character() -> None:
    assert "".join(streamed(byte_ids("one🚴two"), ("🚴t",))) == "one"
    assert "".join(streamed(byte_ids("one🚴"), ("🚴",))) == "one"


class Counting:
    """A tokenizer that counts how often it decodes."""

    def __init__(self) -> None:
        self.calls = 0

    def decode(self, *given: object, **options: object) -> str:
        self.calls += 1
        return str(BYTES.decode(*given, **options))


def test_text_is_decoded_once_a_token() -> None:
    """But for a new window now and then."""
    tokenizer, text = Counting(), "All work and no play makes Jack a dull boy. " * 20
    stream = TextStream(tokenizer)  # type: ignore[arg-type]
    assert "".join(map(stream.push, byte_ids(text))) + stream.flush() == text
    assert tokenizer.calls < 1.1 * len(text)


@pytest.mark.parametrize("make", [byte_tokenizer, sentence_pieces])
def test_special_tokens_do_not_pile_up(make: Callable[[], PreTrainedTokenizerFast]) -> None:
    """As where the output goes on after its end: all would be decoded again with each."""
    tokenizer = make()
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    many, ids = [tokenizer.eos_token_id] * 100, tokenizer.encode("a a", add_special_tokens=False)
    stream = TextStream(tokenizer)
    text = "".join(map(stream.push, [*many, *ids, *many]))
    assert len(stream._window) < 40
    text += "".join(map(stream.push, [*ids, *many, *ids])) + stream.flush()
    assert text == tokenizer.decode([*ids, *ids, *ids])


@pytest.mark.parametrize("bad", [b"\x80", b"\xff", b"\xf0\x9f\x98"])
def test_bytes_that_become_no_character_do_not_pile_up(bad: bytes) -> None:
    raw = b"a" + bad * 70 + "é🚴".encode() + bad * 70 + b"b" + bad
    stream = TextStream(BYTES)
    text = ""
    for token in byte_ids(raw):
        text += stream.push(token)
        assert len(stream._window) < 40
    assert text + stream.flush() == raw.decode(errors="replace")


def test_stop_strings_in_spared_tokens() -> None:
    """Those in the text of the first tokens do not count, nor do those that begin there."""
    tokenizer = byte_tokenizer()
    stream = TextStream(tokenizer, ["ab"], least=3)
    pieces = [stream.push(token) for token in tokenizer.encode("ababab")]
    assert pieces == ["a", "b", "a", "b", "", ""]
    assert stream.stopped
    assert stream.text == "abab"


def test_spaces_that_a_tokenizer_would_clean_up() -> None:
    """Text that was passed on does not change with what comes after it."""
    words = {word: at for at, word in enumerate(["[UNK]", "it", "'", "s", "a", "##b", "!"])}
    core = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece(cleanup=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=True)
    ids = [words[word] for word in ("it", "'", "s", "a", "##b", "!", "a")]
    assert tokenizer.decode(ids) == "it's ab! a"  # it does
    assert "".join(streamed(ids, tokenizer=tokenizer)) == "it ' s ab ! a"
