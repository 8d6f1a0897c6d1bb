"""What a job gives, in the shapes of the OpenAI API."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from paceline.drafters.prediction import Alignment, Progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from paceline.decoding.logprobs import Logprob
    from paceline.decoding.request import Request
    from paceline.serve.tools import ToolText
    from paceline.serve.worker import Job, News

#: What stands for a byte in a token's own spelling: in SentencePiece's, and in GPT-2's.
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTE_LEVEL = {chr(byte): byte for byte in _PLAIN} | {
    chr(256 + at): byte for at, byte in enumerate(sorted(set(range(256)) - set(_PLAIN)))
}

REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


class AnswerChoice:
    """One of an answer's choices, as it grows."""

    def __init__(
        self, index: int, *, chat: bool, tools: ToolText | None, logprobs: bool, trace: bool, echo: str = ""
    ) -> None:
        self.index, self.chat, self.logprobs, self.trace, self.echo = index, chat, logprobs, trace, echo
        self.tools = tools
        self.text, self.tokens = "", 0  # so far
        self.offset = 0  # of the next token in the text, part of which may be held back

    def delta(self, news: News, text_of: TokenTexts) -> dict[str, Any]:
        """What is new of it, as a choice of a stream's chunk."""
        text = "".join(piece.text for piece in news.pieces)
        calls: list[dict[str, Any]] = []
        if self.tools:
            text = self.tools.push(text)
            if news.finish_reason:
                text, calls = text + self.tools.flush(), self.tools.calls
        text, self.echo = self.echo + text, ""
        self.text, self.tokens = self.text + text, self.tokens + len(news.tokens)
        content: dict[str, Any] = {"content": text}
        if calls:
            content["tool_calls"] = [{"index": at} | call for at, call in enumerate(calls)]
        choice: dict[str, Any] = {"index": self.index} | ({"delta": content} if self.chat else {"text": text})
        choice["logprobs"] = None
        if self.logprobs:
            if self.chat:
                choice["logprobs"] = chat_logprobs(text_of, news.tokens, news.logprobs)
            else:
                choice["logprobs"] = completion_logprobs(text_of, news.tokens, news.logprobs, self.offset)
                self.offset += sum(map(text_of.characters, news.tokens))
        reason = REASONS.get(news.finish_reason or "")
        choice["finish_reason"] = "tool_calls" if calls and reason == "stop" else reason  # else it may be cut in one
        if self.trace:
            choice["paceline"] = traced(news, text_of)
        return choice

    def whole(self, deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """All of it, as a choice of a response."""
        choice = dict(deltas[-1])
        if self.chat:
            del choice["delta"]
            choice["message"] = {"role": "assistant", "content": self.text}
            if self.tools and self.tools.calls:
                choice["message"] |= {"tool_calls": self.tools.calls, "content": self.text.strip() or None}
        else:
            choice["text"] = self.text
        for key in ("logprobs", "paceline"):  # lists, one after another
            if choice.get(key) is not None:
                parts = [delta[key] for delta in deltas]
                choice[key] = {name: [one for part in parts for one in part[name]] for name in parts[0]}
        return choice


class TokenTexts:
    """Tokens' own texts, as they stand inside a text: at its beginning some tokenizers leave a space out."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._before = tokenizer, list(tokenizer.encode("a", add_special_tokens=False))[-1:]
        self._known = len(str(tokenizer.decode(self._before)))
        added = tokenizer.added_tokens_decoder.items()
        self._special = {*tokenizer.all_special_ids, *(token for token, about in added if about.special)}

    def __call__(self, token: int) -> str:
        return str(self._tokenizer.decode([*self._before, token]))[self._known :]

    def bytes(self, token: int) -> list[int] | None:
        """Of a token, which may be part of a character; None where they cannot be told."""
        if "\ufffd" not in (text := self(token)):
            return list(text.encode())
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if byte := _BYTE.fullmatch(piece):
            return [int(byte[1], 16)]
        return [_BYTE_LEVEL[letter] for letter in piece] if _BYTE_LEVEL.keys() >= set(piece) else None

    def name(self, token: int) -> str:
        """Its text, or what stands for it in OpenAI's API where that is no text."""
        if "\ufffd" not in (text := self(token)):
            return text
        known = self.bytes(token)
        return f"token_id:{token}" if known is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in known)

    def characters(self, token: int) -> int:
        """How many begin in it; texts leave special tokens out."""
        if token in self._special:
            return 0
        known = self.bytes(token)
        return len(self(token)) if known is None else sum(byte & 0xC0 != 0x80 for byte in known)


def chat_logprobs(text_of: TokenTexts, tokens: Sequence[int], logprobs: Sequence[Logprob]) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": text_of.name(token), "logprob": logprob, "bytes": text_of.bytes(token)}

    return {
        "content": [
            entry(token, known.logprob) | {"top_logprobs": [entry(*pair) for pair in known.top]}
            for token, known in zip(tokens, logprobs, strict=True)
        ]
    }


def completion_logprobs(
    text_of: TokenTexts, tokens: Sequence[int], logprobs: Sequence[Logprob], offset: int
) -> dict[str, Any]:
    lengths = [text_of.characters(token) for token in tokens]

    def likeliest(token: int, known: Logprob) -> dict[str, float]:
        """The chosen one comes with them, as in OpenAI's API. Tokens may share a text; the likeliest has it."""
        pairs = [(token, known.logprob), *reversed(known.top)]
        return {text_of.name(token): logprob for token, logprob in pairs}

    return {
        "tokens": [text_of.name(token) for token in tokens],
        "token_logprobs": [known.logprob for known in logprobs],
        "top_logprobs": [likeliest(token, known) for token, known in zip(tokens, logprobs, strict=True)],
        "text_offset": [offset + sum(lengths[:at]) for at in range(len(tokens))],
    }


def traced(news: News, text_of: TokenTexts) -> dict[str, Any]:
    """Who proposed what, and what the round was: for those who ask, and the page."""
    trace: dict[str, Any] = {
        "tokens": news.tokens,
        "sources": news.sources,
        "pieces": [piece._asdict() for piece in news.pieces],
        "rounds": [],
    }
    if news.record and news.tree and news.tokens:
        nodes = zip(news.tree.tokens, news.tree.parents, news.tree.sources, strict=True)
        tree = [{"text": text_of(token), "parent": parent, "source": source} for token, parent, source in nodes]
        record = news.record
        trace["rounds"] = [
            {
                "drafted": record.drafted,
                "accepted": record.accepted,
                "emitted": record.emitted,
                "seconds": record.seconds,
                "path": news.path,
                "tree": tree,
            }
        ]
    return trace


def usage(job: Job, output: int) -> dict[str, Any]:
    """Tokens of a job, `output` of them new: counted by their ids, not by chunks."""
    firsts = job.requests[:: job.choices]
    prompts = sum(request.prompt_length for request in firsts)
    known = [request for request in job.requests if request.prediction]
    accepted = sum(_followed(job, request) for request in known)
    predicted = sum(len(request.prediction) for request in known)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": output,
        "total_tokens": prompts + output,
        "prompt_tokens_details": {"cached_tokens": sum(request.stats.reused_tokens for request in firsts)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": max(predicted - accepted, 0),
        },
    }


def speculation(job: Job) -> dict[str, Any]:
    """`metrics` of a response, as harnesses read it."""
    rounds = [record for request in job.requests for record in request.stats.rounds]
    drafted = [record for record in rounds if record.drafted]
    histogram = Counter(record.accepted for record in drafted)
    proposed, accepted = sum(r.drafted for r in drafted), sum(r.accepted for r in drafted)
    return {
        "speculative_decoding": {
            "num_steps": len(rounds),
            "num_spec_steps": len(drafted),
            "num_draft_tokens": proposed,
            "num_accepted_tokens": accepted,
            "acceptance_rate": accepted / proposed if proposed else 0.0,
            "acceptance_length": 1 + accepted / len(drafted) if drafted else 1.0,
            "acceptance_histogram": [histogram[n] for n in range(max(histogram, default=-1) + 1)],
        }
    }


def envelope(kind: str, name: str, model: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def _followed(job: Job, request: Request) -> int:
    """Tokens of the output so far that were as predicted."""
    if request not in job.followed:
        job.followed[request] = Progress(Alignment(request.prediction), request.prompt_length)
    return job.followed[request].follow(request.ids).followed
