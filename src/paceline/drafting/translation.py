"""A request's text as a draft model reads it, whose tokenizer may be another than the target's.

Token-level intersection (Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies", 2025): the draft model proposes tokens that both models have, and nothing else. What it
reads is translated token by token, so that what it has read stays as it is while the text grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.errors import TokenizerMismatch
from paceline.targets.tokenizers import token_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST = 8  # tokens that one is translated to; of a longer run of spaces, say, the last


class DraftText:
    """The text, in the target's own tokens: the draft model has the same."""

    most = 1  # tokens that one of the target's may be

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def of(self, token: int) -> list[int]:
        """The draft model's tokens for one of the target's."""
        return [token]

    def read(self, ids: list[int]) -> None:
        """The text has grown to these tokens of the target."""
        self.ids = ids

    def place(self, tokens: int) -> int:
        """How many tokens the first `tokens` of the target are."""
        return tokens


class Translation:
    """From the target's tokens to those of a draft model.

    Args:
        target, drafter: their tokenizers.
        sizes: tokens that each of the two models has logits for.

    Attributes:
        tokens: ids of what both have.
        columns: the draft model's ids of these.
        start: what the draft model's texts begin with: nothing, or one token.
        bos: what the target's may begin with.

    Raises:
        TokenizerMismatch: the tokens of one of them cannot be compared, or they share none.
    """

    def __init__(
        self, target: PreTrainedTokenizerBase, drafter: PreTrainedTokenizerBase, sizes: tuple[int, int]
    ) -> None:
        self._texts, theirs = token_texts(target), token_texts(drafter)
        # Of tokens with the same text the later one is that which tokenizers choose: bytes come before words.
        own = {text: token for token, text in sorted(self._texts.items()) if token < sizes[0]}
        self._pieces = {text: token for token, text in sorted(theirs.items()) if token < sizes[1]}
        self._longest = max((len(text) for text in self._pieces if isinstance(text, bytes)), default=0)
        pairs = {token: self._pieces[text] for text, token in own.items() if text in self._pieces}
        for role in ("bos_token_id", "eos_token_id"):
            ours, other = getattr(target, role), getattr(drafter, role)
            there = ours is not None and other is not None and ours < sizes[0] and other < sizes[1]
            if there and ours not in pairs and other not in pairs.values():
                pairs[ours] = other
        if not pairs:
            raise TokenizerMismatch("draft-model: the two tokenizers have no token in common")
        self.tokens, self.columns = list(pairs), list(pairs.values())
        self._known = {token: [other] for token, other in pairs.items()}
        self.start = [token for token in drafter("").input_ids[:1] if token == drafter.bos_token_id]
        self.bos = target.bos_token_id
        stand_ins = (drafter.unk_token_id, self._pieces.get(b" "), self.columns[0])
        self._nothing = next(token for token in stand_ins if token is not None)

    def of(self, token: int) -> list[int]:
        """The draft model's tokens for one of the target's: 1 to `MOST`."""
        found = self._known.get(token)
        if found is None:
            text = self._texts.get(token, b"")
            found = self._known[token] = self._split(text.encode() if isinstance(text, str) else text)
        return found

    def _split(self, text: bytes) -> list[int]:
        """The longest token that a text begins with, and so on. Bytes that no token has are left out."""
        found, at = [], 0
        while at < len(text):
            sizes = range(min(self._longest, len(text) - at), 0, -1)
            size = next((size for size in sizes if text[at : at + size] in self._pieces), 0)
            if size:
                found.append(self._pieces[text[at : at + size]])
            at += size or 1
        return found[-MOST:] or [self._nothing]


class TranslatedText(DraftText):
    """The text in the draft model's tokens."""

    most = MOST

    def __init__(self, ids: Sequence[int], translation: Translation) -> None:
        self._translation = translation
        begun = bool(ids) and ids[0] == translation.bos
        super().__init__([] if begun else list(translation.start))
        self._ends = [len(self.ids)]  # of each of the target's tokens
        self.read(ids)

    def of(self, token: int) -> list[int]:
        return self._translation.of(token)

    def read(self, ids: Sequence[int]) -> None:
        for token in ids[len(self._ends) - 1 :]:
            self.ids.extend(self._translation.of(token))
            self._ends.append(len(self.ids))

    def place(self, tokens: int) -> int:
        return self._ends[tokens]
