from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from paceline.report import (
    Bar,
    DataTable,
    Figure,
    Interval,
    Section,
    Series,
    Swatch,
    bars,
    colour,
    intervals,
    lines,
    render,
)
from paceline.report.charts import WIDTH, _powers, _ticks
from pages import check_stands_alone

numbers = st.floats(-1e6, 1e6).map(lambda value: round(value, 3))


@given(numbers, numbers)
def test_ticks_are_few_and_reach_around_the_values(one: float, other: float) -> None:
    low, high = sorted((one, other))
    ticks = _ticks(low, high)
    assert ticks[0] <= low + 1e-6 * abs(low)
    assert ticks[-1] >= high - 1e-6 * abs(high)
    assert 2 <= len(ticks) <= 8
    assert ticks == sorted(set(ticks))


@given(st.floats(1, 1e4), st.floats(1, 1e4))
def test_powers_of_two_reach_around_the_values(one: float, other: float) -> None:
    low, high = sorted((one, other))
    ticks = _powers(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high * (1 - 1e-6)
    assert len(ticks) >= 2


def test_intervals_lie_where_their_values_are() -> None:
    drawn = intervals([Interval("a", 1, 2.0, 1.0, 3.0), Interval("b", 2, 1.5)], "x", reference=1.0, reach=(1.0, 3.0))
    [ends] = re.findall(r'x1="([\d.]+)" y1="[\d.]+" x2="([\d.]+)" y2="[\d.]+" class="interval"', drawn)
    low, high = map(float, ends)
    first, second = (float(x) for x in re.findall(r'cx="([\d.]+)"', drawn))
    assert low < first < high
    assert abs(first - (low + high) / 2) < 0.2
    assert second < first
    assert "2.00 (1.00 to 3.00)" in drawn
    assert all(0 <= float(x) <= WIDTH for x in re.findall(r' c?x[12]?="([\d.]+)"', drawn))


def test_parts_of_a_bar_follow_each_other() -> None:
    drawn = bars([Bar("a", [1.0, 3.0])], ["first", "second"], "ms")
    (x, width), (next_x, next_width) = (
        map(float, found) for found in re.findall(r'x="([\d.]+)" y="\d+" width="([\d.]+)"', drawn)
    )
    assert abs(x + width - next_x) < 0.2
    assert abs(next_width - 3 * width) < 0.5
    assert "a, second: 3 ms" in drawn


def test_lines_over_doublings() -> None:
    drawn = lines(
        [Series("curve", 8, [(1, 1), (2, 2), (4, 4)]), Series("dot", 16, [(2, 3)], marks=True)], "k", "y", doubling=True
    )
    [points] = re.findall(r'<polyline points="([^"]+)"', drawn)
    first, second, third = (float(point.partition(",")[0]) for point in points.split())
    assert abs((second - first) - (third - second)) < 0.2
    assert 'class="k0 dashed"' in drawn
    assert 'class="k0 dotted"' in drawn
    assert "dot: 3 at 2" in drawn


def test_a_page_escapes_all_text() -> None:
    evil = "<script>alert('&')</script>"
    chart = lines([Series(evil, 0, [(0, 0)])], evil, evil)
    section = Section(
        evil,
        evil,
        [DataTable([evil], [[evil]])],
        [(evil, evil)],
        [Figure(evil, chart, evil, [Swatch(evil, colour(0))] * 2, DataTable([evil], [[evil]]))],
        [(evil, evil)],
    )
    parsed = check_stands_alone(render(evil, evil, [section], wrong=[evil], notes=[evil]))
    assert parsed.text.count(evil) >= 18
