"""Plain decoding and a method on one prompt, side by side."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import StringIO
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from paceline.cli.console import Palette, as_result, fancy, harmless, summary
from paceline.files import whole

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.api import LLM
    from paceline.decoding.request import Request
    from paceline.decoding.text import Piece

PLAIN = "plain decoding"
SIDE_BY_SIDE = 72  # columns; narrower terminals get one panel above the other
PROMPT_LINES = 20  # more are cut
PICTURE = 110  # columns
REFRESH = 5  # redraws a second, whatever is decoded: drawing must not favour whoever needs fewer rounds


@dataclass
class Side:
    """One of the two runs, as far as it has come."""

    title: str
    llm: LLM
    request: Request
    decode: Callable[[list[Request]], Iterator[Request]]
    pieces: list[Piece] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    def run(self) -> None:
        for _ in self.decode([self.request]):
            self.pieces += self.request.read()

    def status(self) -> str:
        """Speed and acceptance so far."""
        stats = self.request.stats
        seconds = stats.seconds or stats.prefill_seconds + sum(stats.split.values())  # the former when it has ended
        if not (stats.tokens and seconds):
            return ""
        return f"{stats.tokens} tokens · {stats.tokens / seconds:.1f}/s · tau {stats.tau:.2f}"


def sides(llm: LLM, ids: list[int], params: dict[str, Any], title: str) -> tuple[Side, Side]:
    """Both runs, ready to start: with one seed, and after a short warm-up each, so that neither pays for first use."""
    import torch

    if params["seed"] is None:
        params = params | {"seed": int(torch.randint(2**31, ()))}

    def side(name: str, decoder: LLM, decode: Callable[[list[Request]], Iterator[Request]]) -> Side:
        few = min(8, params["max_new_tokens"])
        short = params | {"max_new_tokens": few, "min_new_tokens": min(few, params.get("min_new_tokens", 0))}
        for _ in decode(decoder.requests([ids], **short)):
            pass
        return Side(name, decoder, decoder.requests([ids], **params)[0], decode)

    plain = llm.method("none")
    return side(PLAIN, plain, plain.engine.run), side(title, llm, llm.run)  # which drafts what a grammar forces, too


def compare_runs(llm: LLM, ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
    """Both runs without a display, for `--json`."""
    plain, method = sides(llm, ids, params, "")
    plain.run()
    method.run()
    difference = _first_difference(plain, method)
    return {
        "plain": as_result(plain.request, plain.text),
        "paceline": as_result(method.request, method.text),
        "speedup": _speedup(plain, method),
        "identical": difference is None,
        "first_difference": difference,
    }


def show_comparison(
    console: Console,
    llm: LLM,
    ids: list[int],
    params: dict[str, Any],
    prompt: str,
    title: str,
    picture: Path | None = None,
) -> None:
    """Plain decoding first, then the method, each streaming into its panel; plain lines where panels cannot be.

    Args:
        picture: SVG file to write, of what a terminal would show in the end.
    """
    plain, method = both = sides(llm, ids, params, title)
    palette = Palette()
    if fancy(console):
        console.print(_prompt(console, prompt))
        with Live(
            get_renderable=lambda: _panels(console, both, palette, console.height - 2),
            console=console,
            refresh_per_second=REFRESH,
            transient=True,
        ):
            plain.run()
            method.run()
        _print_panels(console, both, palette)
    else:
        for side in both:
            side.run()
            console.print(f"--- {side.title}", Text(harmless(side.text)), "", sep="\n", markup=False, soft_wrap=True)
    _print_figures(console, both)
    if picture:
        recorded = Console(record=True, file=StringIO(), width=PICTURE, force_terminal=True, highlight=False)
        recorded.print(_prompt(recorded, prompt))
        _print_panels(recorded, both, palette)
        _print_figures(recorded, both)
        # Without the fonts that rich would fetch from elsewhere: the reader's own do.
        drawn = re.sub(
            r"@font-face \{.*?\}", "", recorded.export_svg(title="paceline generate --compare"), flags=re.DOTALL
        )
        with whole(picture) as file:
            file.write_text(drawn, "utf-8")


def _print_panels(console: Console, both: tuple[Side, Side], palette: Palette) -> None:
    console.print(_panels(console, both, palette), palette.legend(Counter(both[1].request.stats.sources)))


def _print_figures(console: Console, both: tuple[Side, Side]) -> None:
    for side in both:
        console.print(f"{side.title}: {summary(side.request.stats)}", markup=False)
    console.print(_verdict(*both), style="bold" if fancy(console) else None)


def _panels(console: Console, both: tuple[Side, Side], palette: Palette, height: int | None = None) -> RenderableType:
    """The two panels; with a `height` in lines, as much of their texts' ends as fits into it."""
    beside = console.width >= SIDE_BY_SIDE
    width = (console.width // 2 if beside else console.width) - 4  # borders and padding
    texts = [palette.text(side.pieces).wrap(console, width) for side in both]
    lines = [len(text) for text in texts]
    if height is not None:
        room = max(1, (height if beside else height // 2) - 2)
        lines = [min(count, room) for count in lines]
    if beside:
        lines = [max(lines)] * 2
    panels = [
        Panel(
            Text("\n").join(text[-count:]),
            height=count + 2,
            title=Text(side.title),
            subtitle=Text(side.status()),
            border_style="dim",
        )
        for side, text, count in zip(both, texts, lines, strict=True)
    ]
    if not beside:
        return Group(*panels)
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(*panels)
    return grid


def _prompt(console: Console, prompt: str) -> Panel:
    lines = Text(harmless(prompt.strip())).wrap(console, console.width - 4)
    shown = Text("\n").join(lines[:PROMPT_LINES])
    if len(lines) > PROMPT_LINES:
        shown.append(f"\n… {len(lines) - PROMPT_LINES} more lines", "dim")
    return Panel(shown, title="prompt", border_style="dim")


def _verdict(plain: Side, method: Side) -> str:
    speed = f"{_speedup(plain, method):.2f} times the speed of plain decoding"
    difference = _first_difference(plain, method)
    if difference is None:
        return f"{speed}; the token ids are identical."
    if method.request.sampling:
        return f"{speed}; sampled from the same distribution, the texts part at token {difference + 1}."
    return f"{speed}; the token ids differ from token {difference + 1} on."


def _speedup(plain: Side, method: Side) -> float:
    return method.request.stats.tokens_per_s / plain.request.stats.tokens_per_s


def _first_difference(plain: Side, method: Side) -> int | None:
    """Index of the first token that differs; None when the outputs are identical."""
    pairs = zip_longest(plain.request.output, method.request.output)
    return next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
