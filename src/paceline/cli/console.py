"""What commands print: coloured pieces, statistics, results as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from paceline.api import LLM
    from paceline.decoding.request import Request
    from paceline.decoding.stats import Stats
    from paceline.decoding.text import Piece

TARGET = "target"
PLAIN = "default"  # the terminal's own colour
_COLOURS = ("cyan", "magenta", "yellow", "green", "blue")
_HARMLESS = {code: 0xFFFD for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}


def fancy(console: Console) -> bool:
    """Whether the console takes colours and redrawing: a terminal, and NO_COLOR is not set."""
    return console.is_terminal and not console.is_dumb_terminal and not os.environ.get("NO_COLOR")


#: Lines for stderr that wait for the end of a command: see `note`.
NOTES: list[str] = []


def note(line: str) -> None:
    """A line to the side: at once on a terminal, else once the command has ended well, as an error stands alone."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr)
    else:
        NOTES.append(line)


def tell_notes() -> None:
    """The lines that wait."""
    for line in NOTES:
        print(line, file=sys.stderr)
    NOTES.clear()


def harmless(text: str) -> str:
    """Text fit for a terminal: a model may write control characters, and those must not drive it."""
    return text.translate(_HARMLESS)


class Palette:
    """A colour for each drafter, in order of appearance; the target's tokens keep the terminal's own."""

    def __init__(self) -> None:
        self.styles: dict[str, str] = {TARGET: PLAIN}

    def style(self, source: str) -> str:
        return self.styles.setdefault(source, _COLOURS[(len(self.styles) - 1) % len(_COLOURS)])

    def text(self, pieces: Iterable[Piece]) -> Text:
        text = Text()
        for piece in pieces:
            text.append(harmless(piece.text), self.style(piece.source))
        return text

    def legend(self, counts: Mapping[str, int]) -> Text:
        """Who proposed how many tokens."""
        text = Text("tokens proposed by  ", "dim")
        for source, count in counts.items():
            text.append(f"■ {source} {count}  ", self.style(source))
        return text


def write(llm: LLM, request: Request, colour: bool) -> None:
    """Run the request, its text going to standard output as it comes; a last line is always ended."""
    console, palette, last = Console(), Palette(), ""
    coloured = colour and fancy(console)
    for _ in llm.run([request]):
        for piece in request.read():
            last = harmless(piece.text) if console.is_terminal else piece.text
            style = palette.style(piece.source)
            # not through rich, which would expand tabs without knowing the column
            sys.stdout.write(last if not coloured or style == PLAIN else typer.style(last, fg=style))
        sys.stdout.flush()
    if not last.endswith("\n"):
        print(flush=True)


def summary(stats: Stats) -> str:
    """One line: tokens, speed, acceptance, who proposed what of the output, and where the time went."""
    parts = [f"{stats.tokens} tokens", f"{stats.tokens_per_s:.1f} tokens/s", f"tau {stats.tau:.2f}"]
    if stats.drafted:
        parts.append(f"accepted {stats.accepted} of {stats.drafted} drafted ({stats.v_d:.0%})")
        whose = Counter(stats.sources).most_common()
        parts.append(", ".join(f"{source} {count / stats.tokens:.0%}" for source, count in whose) + " of tokens")
    split = {"prefill": stats.prefill_seconds, **stats.split}
    total = sum(split.values()) or 1.0
    parts.append(", ".join(f"{phase} {seconds / total:.0%}" for phase, seconds in split.items()))
    return " · ".join(parts)


def as_result(request: Request, text: str) -> dict[str, Any]:
    """What `--json` tells of a finished request."""
    return {
        "text": text,
        "tokens": request.output,
        "finish_reason": request.finish_reason,
        "provenance": request.stats.sources,
        "stats": request.stats.as_dict(),
    }


def print_json(value: object) -> None:
    json.dump(value, sys.stdout, ensure_ascii=False)
    print()
