"""The charts of a benchmark's report, each of one temperature's results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from paceline.bench.methods import AR
from paceline.bench.metrics import accepted_by_depth
from paceline.bench.suites import OVERALL
from paceline.decoding.stats import PHASES
from paceline.report import Bar, DataTable, Figure, Interval, Series, Swatch, bars, colour, intervals, lines, shade

if TYPE_CHECKING:
    from paceline.bench.journal import Run
    from paceline.bench.metrics import ResultRow

DEPTHS, TRIALS = 10, 10  # of drafted tokens; rounds that a share is told of, at least
STEPS = 12  # along the output
ENOUGH = 12  # passes of a width
BARS = "Dot: measured. Bar: where it lies for prompts like these (95 %)."
PHASE_NAMES = {"draft": "drafting", "verify": "verification", "sample": "sampling", "other": "other, prompt included"}

Colours = Mapping[str, int]  # of the methods
Rounds = Sequence[tuple[int, int, int, int]]  # of one answer: drafted, depth, accepted, emitted


def figures(
    rows: Sequence[ResultRow], runs: Sequence[Run], colours: Colours, profile: dict[str, Any] | None
) -> list[Figure]:
    """All that the results have something to say for; without `runs` there are no more than two kinds."""
    rounds = {name: [answer for run in runs if run.method == name for answer in run.rounds or ()] for name in colours}
    drafting = {name: own for name, own in rounds.items() if any(drafted for answer in own for drafted, *_ in answer)}
    found = [*_speedups(rows, colours), _phases(rows)]
    if drafting:
        found += [_acceptance(drafting, colours), _lengths(drafting, colours)]
        if rows[0]["batch"] == 1:
            found.append(_costs(drafting, runs, colours, profile))
    return [figure for figure in found if figure]


def _speedups(rows: Sequence[ResultRow], colours: Colours) -> Iterator[Figure]:
    """One a task, all with the same axis."""
    known = [
        (row, row["speedup_ar"], row.get("speedup_ar_95") or (None, None))
        for row in rows
        if row["speedup_ar"] is not None and row["method"] != AR
    ]
    ends = [end for _, value, span in known for end in (value, *span) if end is not None]
    tasks = list(dict.fromkeys(row["task"] for row, *_ in known))
    for task in tasks[1:] if len(tasks) == 2 else tasks:  # a single task is all there is
        own = [(row, value, span) for row, value, span in known if row["task"] == task]
        drawn = [Interval(row["method"], colours[row["method"]], value, *span) for row, value, span in own]
        yield Figure(
            f"Speedup: {'all tasks' if task == OVERALL else task}",
            intervals(drawn, "x plain decoding", reference=1.0, reach=(min(ends), max(ends))),
            f"{own[0][0]['prompts']} prompts. {BARS if any(span[0] for *_, span in own) else ''}",
        )


def _phases(rows: Sequence[ResultRow]) -> Figure | None:
    known = [
        (row["method"], [1000 * row["split"][phase] / row["tokens"] for phase in PHASES])
        for row in rows
        if row["task"] == OVERALL and row["split"]
    ]
    if not known:
        return None
    names = [PHASE_NAMES[phase] for phase in PHASES]
    return Figure(
        "Where the time goes",
        bars([Bar(*one) for one in known], names, "ms a token"),
        "Milliseconds an output token; shorter is faster.",
        [Swatch(name, shade(place)) for place, name in enumerate(names)],
        DataTable(["method", *names], [[name, *(f"{part:.3f}" for part in parts)] for name, parts in known]),
    )


def _acceptance(rounds: Mapping[str, Sequence[Rounds]], colours: Colours) -> Figure | None:
    curves = {name: list(acceptance(r for answer in own for r in answer)) for name, own in rounds.items()}
    return _curves(
        "Acceptance by depth",
        curves,
        colours,
        "depth of the drafted token",
        "share accepted, of those whose predecessors were",
        "How many of the drafts that were right so far are right at this depth too.",
        ".2f",
    )


def acceptance(rounds: Iterable[Sequence[int]]) -> Iterator[tuple[float, float]]:
    """Depth n and P(a token at depth n was accepted | one at each depth before it was, and drafts went that far).

    As `n_alpha`, but for trees as well, where any branch counts.
    """
    for n, (accepted, trials) in enumerate(accepted_by_depth(rounds, DEPTHS), start=1):
        if trials >= TRIALS:
            yield n, accepted / trials


def _lengths(rounds: Mapping[str, Sequence[Rounds]], colours: Colours) -> Figure | None:
    longest = max(sum(r[3] for r in answer) for own in rounds.values() for answer in own)
    step = max(1, -(-longest // STEPS))
    return _curves(
        "Draft length over the output",
        {name: list(lengths(own, step)) for name, own in rounds.items()},
        colours,
        "tokens of the output before the round",
        "depth of the draft, mean",
        "How far the policy lets the drafter go, and how that changes as the text goes on.",
        ".2f",
    )


def lengths(answers: Iterable[Rounds], step: int) -> Iterator[tuple[float, float]]:
    """Where rounds begin in the output, `step` tokens at a time, and the mean depth of their drafts."""
    depths: dict[int, list[int]] = defaultdict(list)
    for answer in answers:
        at = 0
        for _, depth, _, emitted in answer:
            depths[at // step].append(depth)
            at += emitted
    for place, found in sorted(depths.items()):
        yield step * (place + 0.5), fmean(found)


def _costs(
    rounds: Mapping[str, Sequence[Rounds]], runs: Sequence[Run], colours: Colours, profile: dict[str, Any] | None
) -> Figure:
    drawn = [
        Series(f"{name}: tau", colours[name], [point], marks=True)
        for name, own in rounds.items()
        for point in [_gain(own)]
    ]
    reach = 2 * max(2.0, *(at for one in drawn for at, _ in one.points))
    others: list[tuple[str, list[tuple[float, float]]]] = [("passes of this run", list(passes(runs)))]
    about = "'paceline profile', before the benchmark, adds the machine's roofline."
    if profile and "1" in profile["passes"]:
        single = profile["passes"]["1"]["median"]
        for key, name in (("median", "profile"), ("floor", "roofline: the least")):
            found = [(float(k), one[key] / single) for k, one in profile["passes"].items() if key in one]
            others.append((name, [(at, value) for at, value in found if at <= reach]))
        roof = profile.get("roofline")
        about = f"The profile is of {profile['context']} tokens of context."
        if roof:
            about += f" Roofline: {roof['bandwidth'] / 1e9:.0f} GB/s, {roof['flops'] / 1e9:.0f} GFLOPS."
    lines_ = [
        Series(name, number, points)
        for number, (name, points) in zip((0, 8, 16), others, strict=False)
        if len(points) > 1
    ]
    return Figure(
        "What a pass brings, and what it costs",
        lines([*lines_, *drawn], "tokens read in a pass, mean", "of a pass over one token", doubling=True),
        "Dots: tokens a pass gives (tau). Lines: what a pass of that width takes. A dot above them gains, drafting "
        f"aside. {about}",
        [Swatch(one.name, colour(one.colour)) for one in (*lines_, *drawn)],
        DataTable(
            ["series", "tokens read", "of one"],
            [[one.name, f"{at:.2f}", f"{value:.2f}"] for one in (*drawn, *lines_) for at, value in one.points],
        ),
    )


def _gain(answers: Iterable[Rounds]) -> tuple[float, float]:
    """Tokens that a pass reads, and that it gives."""
    rounds = [r for answer in answers for r in answer]
    return fmean(1 + r[0] for r in rounds), fmean(r[3] for r in rounds)


def passes(runs: Iterable[Run]) -> Iterator[tuple[float, float]]:
    """Width and median seconds of the run's passes, as multiples of those over one token."""
    found: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        for rounds, timings in zip(run.rounds or (), run.timings or (), strict=bool(run.timings)):
            for (drafted, *_), (_, verify, sample, _) in zip(rounds, timings, strict=True):
                found[1 + drafted].append(verify + sample)
    known = {width: median(seconds) for width, seconds in sorted(found.items()) if len(seconds) >= ENOUGH}
    if 1 in known:
        yield from ((float(width), seconds / known[1]) for width, seconds in known.items())


def _curves(
    title: str,
    curves: Mapping[str, list[tuple[float, float]]],
    colours: Colours,
    x: str,
    y: str,
    about: str,
    form: str,
) -> Figure | None:
    drawn = [Series(name, colours[name], points) for name, points in curves.items() if points]
    if not drawn:
        return None
    places = sorted({at for one in drawn for at, _ in one.points})
    return Figure(
        title,
        lines(drawn, x, y),
        about,
        [Swatch(one.name, colour(one.colour)) for one in drawn],
        DataTable(
            ["method", *(f"{at:g}" for at in places)],
            [
                [one.name, *(format(at[place], form) if place in at else "" for place in places)]
                for one in drawn
                for at in [dict(one.points)]
            ],
        ),
    )
