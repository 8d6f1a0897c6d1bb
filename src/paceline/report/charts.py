"""Charts as SVG elements, for a page's style sheet whose classes `k0` to `k7` are colours and `s0` to `s3` greys.

All are as wide as a phone (`WIDTH`) and scale up from there; every mark tells its figures when it is pointed at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from markupsafe import Markup

WIDTH = 360  # user units, about a CSS pixel each
HEIGHT = 220  # of a chart of lines
LEFT, RIGHT, TOP, BOTTOM = 42, 10, 20, 34  # margins of one
ROW = 32  # height of a row of intervals or bars
AXIS = 20  # height of their axis
LABEL = 34  # characters of a row's label
COLOURS, SHADES = 8, 4

Scale = Callable[[float], float]


class Series(NamedTuple):
    """A line through `points`, or these alone with `marks`. `colour` is counted from 0; from 8 on lines are dashed,
    from 16 on dotted.
    """

    name: str
    colour: int
    points: Sequence[tuple[float, float]]
    marks: bool = False


class Interval(NamedTuple):
    """A value, and where it lies; `low` and `high` None where that is not known."""

    name: str
    colour: int
    value: float
    low: float | None = None
    high: float | None = None


class Bar(NamedTuple):
    """A bar made of parts, one a colour, in the order of the legend."""

    name: str
    parts: Sequence[float]


def colour(number: int) -> str:
    """The classes of a series."""
    return f"k{number % COLOURS}{('', ' dashed', ' dotted')[min(2, number // COLOURS)]}"


def shade(number: int) -> str:
    """The class of a part of a bar: a grey, for colours are those of series."""
    return f"s{number % SHADES}"


def lines(series: Sequence[Series], x: str, y: str, *, doubling: bool = False) -> Markup:
    """Lines and marks over a common axis; the y axis begins at 0.

    Args:
        x, y: what the axes are.
        doubling: the x axis is logarithmic, to base 2; its values are 1 or more.
    """
    xs = [at for one in series for at, _ in one.points]
    ys = [value for one in series for _, value in one.points]
    marks_y = _ticks(min(0.0, *ys), max(ys))
    marks_x = _powers(min(xs), max(xs)) if doubling else _ticks(min(xs), max(xs), whole=True)
    across = _scale(_log if doubling else float, marks_x, LEFT, WIDTH - RIGHT)
    up = _scale(float, marks_y, HEIGHT - BOTTOM, TOP)
    parts = [
        _text(0, 10, y, "dim"),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, x, "dim middle"),
        *(_line((LEFT, up(mark)), (WIDTH - RIGHT, up(mark)), "grid") for mark in marks_y),
        *(_text(LEFT - 5, up(mark) + 4, _number(mark), "dim end") for mark in marks_y),
        *(_line((across(mark), up(marks_y[0])), (across(mark), up(marks_y[0]) + 4), "grid") for mark in marks_x),
        *(_text(across(mark), HEIGHT - BOTTOM + 16, _number(mark), "dim middle") for mark in marks_x),
    ]
    for one in series:
        path = Markup(" ").join(Markup("{:.1f},{:.1f}").format(across(at), up(value)) for at, value in one.points)
        inner = Markup() if one.marks else Markup('<polyline points="{}"/>').format(path)
        few = one.marks or len(one.points) <= 24
        told = (
            Markup('<circle cx="{:.1f}" cy="{:.1f}" r="{}"><title>{}: {} at {}</title></circle>').format(
                across(at), up(value), 5 if one.marks else 2.5, one.name, _number(value), _number(at)
            )
            for at, value in (one.points if few else ())
        )
        parts.append(Markup('<g class="{}">{}{}</g>').format(colour(one.colour), inner, Markup().join(told)))
    return _svg(HEIGHT, parts, f"{y} over {x}")


def intervals(rows: Sequence[Interval], unit: str, *, reference: float, reach: tuple[float, float]) -> Markup:
    """Values with what is known of where they lie, a row each.

    Args:
        reference: a value that all are compared with.
        reach: the least and the largest value of the axis, for charts side by side.
    """
    marks = _ticks(min(reach[0], reference), max(reach[1], reference), most=6)
    across, height = _scale(float, marks, 8, WIDTH - 12), ROW * len(rows)
    at = across(reference)
    parts = [*_axis(marks, across, height), _line((at, 0), (at, height), "reference")]
    for number, row in enumerate(rows):
        y = ROW * number
        told = f"{row.value:.2f}"
        drawn = Markup()
        if row.low is not None and row.high is not None:
            told += f" ({row.low:.2f} to {row.high:.2f})"
            drawn = _line((across(row.low), y + 22), (across(row.high), y + 22), "interval")
        dot = Markup('<circle cx="{:.1f}" cy="{}" r="5"/>').format(across(row.value), y + 22)
        parts += [
            *_heading(row.name, told, y),
            Markup('<g class="{}"><title>{}: {} {}</title>{}{}</g>').format(
                colour(row.colour), row.name, told, unit, drawn, dot
            ),
        ]
    return _svg(height + AXIS, parts, unit)


def bars(rows: Sequence[Bar], names: Sequence[str], unit: str) -> Markup:
    """Bars of the parts `names`, from 0, a row each."""
    totals = [sum(row.parts) for row in rows]
    marks = _ticks(0, max(totals), most=6)
    across, height = _scale(float, marks, 8, WIDTH - 12), ROW * len(rows)
    parts = _axis(marks, across, height)
    for number, (row, total) in enumerate(zip(rows, totals, strict=True)):
        y, before = ROW * number, 0.0
        parts += _heading(row.name, f"{total:.3g}", y)
        for place, (name, part) in enumerate(zip(names, row.parts, strict=True)):
            left, right = across(before), across(before + part)
            before += part
            parts.append(
                Markup('<rect class="{}" x="{:.1f}" y="{}" width="{:.1f}" height="11">{}</rect>').format(
                    shade(place), left, y + 16, right - left, _told(f"{row.name}, {name}: {part:.3g} {unit}")
                )
            )
    return _svg(height + AXIS, parts, unit)


def _heading(name: str, told: str, y: float) -> list[Markup]:
    short = name if len(name) <= LABEL else f"{name[: LABEL - 1]}…"
    return [_text(8, y + 11, short, "name"), _text(WIDTH - 8, y + 11, told, "end")]


def _axis(marks: Sequence[float], across: Scale, height: float) -> list[Markup]:
    parts = []
    for mark in marks:
        x = across(mark)
        parts += [_line((x, 0), (x, height), "grid"), _text(x, height + 13, _number(mark), "dim middle")]
    return parts


def _svg(height: float, parts: Sequence[Markup], label: str) -> Markup:
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, height, label, Markup().join(parts)
    )


def _told(text: str) -> Markup:
    """What a mark says when it is pointed at."""
    return Markup("<title>{}</title>").format(text)


def _text(x: float, y: float, text: str, kind: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" class="{}">{}</text>').format(x, y, kind, text)


def _line(start: tuple[float, float], end: tuple[float, float], kind: str) -> Markup:
    return Markup('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="{}"/>').format(*start, *end, kind)


def _scale(measure: Callable[[float], float], marks: Sequence[float], start: float, end: float) -> Scale:
    """From values between the first and the last mark to places between `start` and `end`."""
    low, high = measure(marks[0]), measure(marks[-1])
    return lambda value: start + (end - start) * (measure(value) - low) / (high - low)


def _log(value: float) -> float:
    return math.log2(value)


def _ticks(low: float, high: float, *, most: int = 5, whole: bool = False) -> list[float]:
    """Round numbers from below `low` to above `high`, 1, 2 or 5 times a power of ten apart; at most about `most`."""
    if high <= low:
        high = low + 1
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _powers(low: float, high: float) -> list[float]:
    """Powers of two from below `low` to above `high`."""
    first = math.floor(math.log2(low))
    return [2.0**number for number in range(first, max(first + 1, math.ceil(math.log2(high) - 1e-9)) + 1)]


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"
