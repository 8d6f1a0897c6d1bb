"""Whether two models read and write the same tokens."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from paceline.errors import TokenizerMismatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = "Hello, world!  Ünïcödé 123,456\n\tdef f(x): return x**2  # 你好 🚴\n<|im_start|></s><s>[INST] naïve café"


def check_same_tokenizer(target: PreTrainedTokenizerBase | None, drafter: PreTrainedTokenizerBase | None) -> None:
    """Compares the tokenizers themselves: vocabulary sizes of two models may agree by accident, and may differ by
    padding alone.

    Raises:
        TokenizerMismatch: when a token string has different ids, or a probe text is split differently.
    """
    if target is None or drafter is None:
        raise TokenizerMismatch("draft-model: both models need their tokenizers, to make sure that they are the same")
    ours, theirs = target.get_vocab(), drafter.get_vocab()
    if ours != theirs:
        differing = {t for t in ours.keys() & theirs.keys() if ours[t] != theirs[t]} | (ours.keys() ^ theirs.keys())
        raise TokenizerMismatch(
            f"draft-model: its tokenizer differs from the target's in {len(differing)} of {len(ours)} tokens"
        )
    if target.encode(PROBE, add_special_tokens=False) != drafter.encode(PROBE, add_special_tokens=False):
        raise TokenizerMismatch("draft-model: its tokenizer has the target's vocabulary but splits text differently")


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of what makes two tokenizers the same: every token's id, and how a probe text is split."""
    facts = [sorted(tokenizer.get_vocab().items()), tokenizer.encode(PROBE, add_special_tokens=False)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
