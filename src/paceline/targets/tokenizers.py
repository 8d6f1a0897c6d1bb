"""Whether two models read and write the same tokens, and what their tokens are in a text."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from paceline.errors import TokenizerMismatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = "Hello, world!  Ünïcödé 123,456\n\tdef f(x): return x**2  # 你好 🚴\n<|im_start|></s><s>[INST] naïve café"
SPACE = "▁"  # as sentencepiece writes it


def require_tokenizer(tokenizer: PreTrainedTokenizerBase | None, what: str) -> PreTrainedTokenizerBase:
    """It, where there is one; else TokenizerMismatch."""
    if tokenizer is None:
        raise TokenizerMismatch(f"{what}: both models need their tokenizers, so that these can be compared")
    return tokenizer


def same_tokenizer(target: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether every token string has the same id, and a probe text is split alike. Vocabulary sizes of two models may
    agree by accident, and may differ by padding alone.
    """
    return target.get_vocab() == other.get_vocab() and _probed(target) == _probed(other)


def token_texts(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes | str]:
    """By token: its bytes in a text, or the name of a special one, which stands for no text.

    Raises:
        TokenizerMismatch: it neither works on bytes nor marks spaces as sentencepiece does.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    spec = json.loads(backend.to_str()) if backend else {}
    parts = spec.get("decoder"), spec.get("pre_tokenizer")
    kinds = {kind for part in parts for kind in _kinds(part)}
    if "ByteLevel" in kinds:
        encode = _by_letters()
    elif kinds & {"Metaspace", "Replace"} and SPACE in json.dumps(parts, ensure_ascii=False):
        encode = _of_sentencepiece
    else:
        kind = type(tokenizer).__name__
        raise TokenizerMismatch(
            f"no way is known to tell the bytes of this {kind}'s tokens: it cannot be compared with another tokenizer"
        )
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return {token: name if token in special else encode(name) for name, token in tokenizer.get_vocab().items()}


def _kinds(part: dict[str, Any] | None) -> Iterator[str]:
    """What kinds of steps a decoder or pre-tokenizer is made of."""
    if part:
        yield part["type"]
        for inner in part.get("decoders", part.get("pretokenizers", ())):
            yield from _kinds(inner)


def _by_letters() -> Callable[[str], bytes]:
    """GPT-2's way: each byte is written as a letter. Names with anything else in them are texts as they stand."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    values = {ord(letter): byte for byte, letter in bytes_to_unicode().items()}
    other = re.compile(f"[^{re.escape(''.join(map(chr, values)))}]")
    return lambda name: name.encode() if other.search(name) else name.translate(values).encode("latin-1")


def _of_sentencepiece(name: str) -> bytes:
    """Bytes that no token covers are written as "<0x0A>"."""
    byte = re.fullmatch("<0x([0-9A-F]{2})>", name)
    return bytes([int(byte[1], 16)]) if byte else name.replace(SPACE, " ").encode()


def _probed(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return list(tokenizer.encode(PROBE, add_special_tokens=False))


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of what makes two tokenizers the same: every token's id, and how a probe text is split."""
    facts = [sorted(tokenizer.get_vocab().items()), _probed(tokenizer)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
