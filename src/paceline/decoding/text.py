"""Text from tokens as they come: whole characters only, stop strings honoured."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


class TextStream:
    """Incremental decoding of one request's output.

    `push` takes a token and returns the text that has become certain: never half a character, never what may turn
    out to be the beginning of a stop string. `stopped` tells that a stop string has appeared; the text ends before it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.text = ""
        self.stopped = False
        self._ids: list[int] = []
        self._prefix = self._read = 0  # decoding restarts a little back: spaces depend on the token before
        self._sent = 0

    def push(self, token: int) -> str:
        self._ids.append(token)
        before, now = self._decode(self._prefix, self._read), self._decode(self._prefix, len(self._ids))
        if len(now) > len(before) and not now.endswith("\ufffd"):  # replacement character: bytes are missing
            self._append(now[len(before) :])
            self._prefix, self._read = self._read, len(self._ids)
        return self._take(len(self.text) if self.stopped else len(self.text) - self._held())

    def flush(self) -> str:
        """The rest, when no more tokens come."""
        if not self.stopped:
            before, now = self._decode(self._prefix, self._read), self._decode(self._prefix, len(self._ids))
            self._append(now[len(before) :])
            self._prefix = self._read = len(self._ids)
        return self._take(len(self.text))

    def _decode(self, start: int, stop: int) -> str:
        return str(self.tokenizer.decode(self._ids[start:stop], skip_special_tokens=True))

    def _append(self, piece: str) -> None:
        longest = max(map(len, self.stop), default=0)
        begin = max(0, len(self.text) - longest)
        self.text += piece
        found = [at for at in (self.text.find(stop, begin) for stop in self.stop) if at >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _held(self) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        return max(
            (n for stop in self.stop for n in range(1, len(stop)) if self.text.endswith(stop[:n])),
            default=0,
        )

    def _take(self, end: int) -> str:
        piece = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece
