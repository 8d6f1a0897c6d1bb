"""Text as it comes, piece by piece, with who proposed it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from paceline.api import LLM
    from paceline.decoding.request import Request


class Piece(NamedTuple):
    text: str
    source: str  # a drafter's name, or "target"


def pieces(llm: LLM, request: Request) -> Iterator[list[Piece]]:
    """Run the request; yields what each round added. The texts joined are `Output.text`.

    A character whose bytes are spread over tokens, and text held back for a stop string, count as the last token's.
    """
    from paceline.decoding.text import TextStream

    text = TextStream(llm.tokenizer, request.text.stop if request.text else ())
    seen = 0
    for _ in llm.engine.run([request]):
        tokens, sources = request.output[seen:], request.stats.sources[seen:]
        seen += len(tokens)
        news = [
            Piece(text.push(token), source)
            for token, source in zip(tokens, sources, strict=True)
            if token not in request.eos
        ]
        if request.finish_reason:
            news.append(Piece(text.flush(), sources[-1]))
        yield [piece for piece in news if piece.text]
