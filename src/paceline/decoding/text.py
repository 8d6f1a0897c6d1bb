"""Text from tokens as they come: whole characters only, stop strings honoured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WINDOW = 16  # tokens: how much is decoded again with each further one, since spaces depend on the token before
OPEN = 3  # replacement characters at most that a character may stand as whose last bytes are missing


class Piece(NamedTuple):
    """Text with who proposed it: a drafter's source, or "target"."""

    text: str
    source: str


class TextStream:
    """Incremental decoding of one request's output, with one call of the tokenizer a token.

    `push` takes a token and returns the text that has become certain: never half a character, never what may turn
    out to be the beginning of a stop string. `stopped` tells that a stop string has appeared; the text ends before it.

    Args:
        least: tokens whose text is not looked at for stop strings.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = (), least: int = 0) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self._spared, self._from = least, 0  # tokens that are left to spare, and where their text ends
        self.text = ""
        self.stopped = False
        self._window: list[int] = []  # the latest tokens; they begin where a character does
        self._decoded = ""  # as much of their text as is in `text`
        self._whole = 0  # how many of them it took
        self._sent = 0

    def continues(self, before: Sequence[int]) -> None:
        """Its text goes on from that of these tokens: the space between is not left out, as it would be by some
        tokenizers at a text's beginning.
        """
        window = list(before[-WINDOW // 2 :])
        text = self._decode(window)
        if not text.endswith("\ufffd"):
            self._window, self._decoded, self._whole = window, text, len(window)

    def push(self, token: int) -> str:
        """The text that has become certain with this token."""
        self._window.append(token)
        self._spared -= 1
        now = self._decode(self._window)
        if len(now) > len(self._decoded) and not now.endswith("\ufffd"):  # replacement character: bytes are missing
            self._append(now[len(self._decoded) :])
            self._decoded = now
            if len(self._window) > WINDOW:
                del self._window[: self._whole]  # what is left begins where a character does
                self._decoded = self._decode(self._window)
            self._whole = len(self._window)
        elif now.endswith("\ufffd" * (OPEN + 1)) and len(self._window) > 2 * WINDOW:  # bytes that become no character
            self._append(now[len(self._decoded) : -OPEN])
            del self._window[:-WINDOW]
            self._decoded, self._whole = self._decode(self._window)[:-OPEN], 0
        elif now == self._decoded and len(self._window) > 2 * WINDOW:  # special tokens, as after an end that is ignored
            del self._window[self._whole : -WINDOW]
        return self._take(len(self.text) if self.stopped else len(self.text) - self._held())

    def flush(self) -> str:
        """The rest, when no more tokens come."""
        if not self.stopped:
            self._append(self._decode(self._window)[len(self._decoded) :])
            self._window, self._decoded, self._whole = [], "", 0
        return self._take(len(self.text))

    def _decode(self, tokens: list[int]) -> str:
        # Spaces are not cleaned up: text that was passed on would change with what comes after it.
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _append(self, piece: str) -> None:
        longest = max(map(len, self.stop), default=0)
        begin = max(self._from, len(self.text) - longest)
        self.text += piece
        if self._spared >= 0:
            self._from = len(self.text)
            return
        found = [at for at in (self.text.find(stop, begin) for stop in self.stop) if at >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _held(self) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        most = len(self.text) - self._from
        return max(
            (
                n
                for stop in self.stop
                for n in range(1, min(len(stop), most + 1))
                if self.text.endswith(stop[:n], self._from)
            ),
            default=0,
        )

    def _take(self, end: int) -> str:
        piece = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece
