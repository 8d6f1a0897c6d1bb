"""`paceline bench --trace`: what was measured becomes a trace, for `paceline replay`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.bench.methods import AR, is_baseline
from paceline.errors import require
from paceline.policies import POLICIES
from paceline.profiling.record import record, sources_of
from paceline.profiling.trace import FREE, Header, Measured, Source, Trace, TracedText
from paceline.registry import split_method
from paceline.targets.costs import costs_of

if TYPE_CHECKING:
    from paceline.api import LLM
    from paceline.bench.config import BenchConfig
    from paceline.bench.journal import Run

TRACE = "trace.jsonl.gz"
BIN = 256  # tokens of context that count as one
ENOUGH = 12  # passes of a width


class TimedPass(NamedTuple):
    """A round of the run: its width, tokens in the cache, and seconds of the pass, of the draft and of what is left."""

    width: int
    context: int
    seconds: float
    draft: float
    other: float


def write_trace(
    path: Path, config: BenchConfig, llm: LLM, texts: Sequence[TracedText], runs: Iterable[Run], machine: dict[str, Any]
) -> None:
    """Record what each drafter of the run would draft along the texts, the outputs of plain decoding.

    Args:
        runs: the greedy ones.

    Raises:
        OptionError: a drafter cannot be traced, or the run was measured by a version that timed no rounds.
    """
    by_method: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_method[run.method].append(run)
    methods = [name for name in config.methods if not is_baseline(name)]
    timed = all(run.timings is not None for name in methods for run in by_method[name])
    require(timed, f"{path.parent} was measured without the times of rounds: choose another folder")
    names = dict.fromkeys(name for method in methods if (name := _drafter(method)) not in (AR, "none"))
    sources, parts = sources_of({name: llm.method(name).drafter for name in names})
    late = {name for name, drafter in sources.items() if drafter.shares_cache}
    passes = {method: list(_passes(by_method[method])) for method in methods}
    whole = [one for method in methods if _drafter(method) not in late for one in passes[method]]
    shares = {
        name: _share([one for method in methods if _drafter(method) == name for one in passes[method]], whole)
        for name in late
    }
    target, about = llm.target, record(sources, texts, shares)
    overhead = median(one.other for one in passes[AR])
    header = Header(
        model=config.model,
        vocab=target.vocab_size,
        context=target.context,
        tier=target.tier,
        machine=machine,
        profile=_profile(whole, llm),
        overhead=overhead,
        choosing={
            method: _choosing(passes[method], [about[part] for part in parts.get(name, [name])], overhead)
            for method in methods
            if (name := _drafter(method)) in about or name in parts
        },
        sources=about,
        parts=parts,
        measured={method: _measured(by_method[method]) for method in methods},
        target=target.name,
    )
    Trace(header, list(texts)).write(path)


def _measured(runs: Iterable[Run]) -> dict[str, Measured]:
    found: dict[str, Measured] = defaultdict(Measured)
    for run in runs:
        sums, timings = found[run.task], run.timings or ()
        sums.tokens += sum(map(len, run.outputs))
        sums.rounds += sum(map(len, timings))
        sums.seconds += sum(sum(phases) for rounds in timings for phases in rounds)
    return dict(found)


def _drafter(method: str) -> str:
    return method if method == AR else split_method(method, POLICIES.__contains__)[0]


def _passes(runs: Iterable[Run]) -> Iterator[TimedPass]:
    for run in runs:
        for length, rounds, timings in zip(run.prompt_tokens, run.rounds or (), run.timings or (), strict=True):
            at = length - 1
            for (drafted, _, _, emitted), (draft, verify, sample, other) in zip(rounds, timings, strict=True):
                yield TimedPass(1 + drafted, at, verify + sample, draft, other)
                at += emitted


def _medians(passes: Iterable[TimedPass]) -> dict[tuple[int, int], float]:
    """Seconds by bin of the context and width."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for one in passes:
        found[one.context // BIN, one.width].append(one.seconds)
    return {key: median(seconds) for key, seconds in found.items() if len(seconds) >= ENOUGH}


def _profile(passes: Sequence[TimedPass], llm: LLM) -> dict[str, Any]:
    """What passes of the run took, as a profile. Widths that it did not have are those of the target's own costs, as
    much slower or faster as the others were.
    """
    found, costs = _medians(passes), costs_of(llm.target)
    bins = sorted({at for at, _ in found}, key=lambda at: -sum(one.context // BIN == at for one in passes))
    by_context = {
        at * BIN + BIN // 2: {width: seconds for (place, width), seconds in sorted(found.items()) if place == at}
        for at in bins
    }
    context, first = next(iter(by_context.items()), (BIN // 2, {}))  # of a short run there may be too few passes
    speed = median(seconds / costs(width, context) for width, seconds in first.items()) if first else 1.0
    first = {int(width): speed * costs(int(width), context) for width in costs.widths} | first
    by_context.pop(context, None)
    return {
        "context": context,
        "passes": {width: {"median": seconds} for width, seconds in sorted(first.items())},
        "contexts": {n: found for n, found in by_context.items() if len(found) > 1},
    }


def _choosing(rounds: Sequence[TimedPass], sources: Sequence[Source], overhead: float) -> float:
    """Seconds of a round that are neither its pass nor its sources', of rounds in which nothing was verified. Those of
    a drafter that pays for its tokens are rounds in which it was not asked: one that is seldom asked has to catch up
    first, which has nothing to do with choosing.
    """
    free = sum(source.levels[0] for source in sources if source.kind == FREE)
    paid = sum(source.levels[0] for source in sources if source.kind != FREE and source.levels)
    least, most = (0.0, paid / 2) if paid and len(sources) == 1 else (free / 2, inf)
    drafts = [one.draft for one in rounds if one.width == 1 and least < one.draft <= most]
    others = median(one.other for one in rounds) - overhead - sum(source.observe for source in sources)
    return max(median(drafts) - free if len(drafts) >= ENOUGH else 0.0, 0.0) + max(others, 0.0)


def _share(own: Sequence[TimedPass], whole: Sequence[TimedPass]) -> float:
    """Of a whole pass, those after drafts of one drafter, which may have been given up."""
    usual = _medians(whole)
    drafting = median([one.draft for one in own if one.width > 1] or [inf])
    after = [one for one in own if one.width > 1 or one.draft > drafting / 2]
    ratios = [seconds / usual[key] for key, seconds in _medians(after).items() if key in usual]
    return median(ratios) if ratios else 1.0
