"""`paceline tune`: costs, and how far each source of drafts can be trusted, on the user's own prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ContextOverflow, require
from paceline.profiling.timing import compare_passes
from paceline.profiling.tuned import Tuned, kept_gates
from paceline.targets import store
from paceline.targets.cost_model import LearnedCosts
from paceline.targets.costs import CONTEXTS, WIDTHS, read_passes, set_costs, settings_path
from paceline.targets.machine import this_machine

if TYPE_CHECKING:
    from paceline.api import LLM
    from paceline.bench.suites import Prompt
    from paceline.decoding.stats import Stats
    from paceline.targets import Target

REPEATS = 5  # measurements of each pass


@dataclass(frozen=True)
class Tuning:
    """What tuning found.

    Attributes:
        path: the file it was stored in.
        plain, auto: tokens a second of decoding, prompts aside.
        tau: tokens a pass of `auto`.
        sources: by name, how many tokens each proposed.
    """

    path: Path
    plain: float
    auto: float
    tau: float
    sources: dict[str, int]


def tune(llm: LLM, prompts: Sequence[Prompt], max_new_tokens: int = 128) -> Tuning:
    """Measure passes, decode the prompts with and without drafting by turns, and store what was learned.

    Args:
        llm: with `auto`, or any drafter with an automatic budget; loaded `fresh`.

    Raises:
        OptionError: there are no prompts, or none that fits the model.
        ModelError: the cache cannot be written.
    """
    plain = llm.method("none")
    ids = [llm.encode(prompt.turns[0]) for prompt in prompts]
    ids = [prompt for prompt in ids if _fits(llm, len(prompt), max_new_tokens)]
    require(bool(ids), "no prompt fits the model's context")
    store.check_writable(settings_path("tuned", llm.target).parent)  # before what takes long
    profile = _passes(llm.target)
    set_costs(llm.target, LearnedCosts.fitted(read_passes(profile)))
    found: dict[bool, list[Stats]] = {True: [], False: []}
    for number, prompt in enumerate(ids):
        for drafts in (True, False) if number % 2 else (False, True):
            decoding = llm if drafts else plain
            [request] = decoding.requests([prompt], max_new_tokens=max_new_tokens)
            for _ in decoding.run([request]):
                pass
            found[drafts].append(request.stats)
    rates = {drafts: _rate(stats) for drafts, stats in found.items()}
    tuned = Tuned(
        machine=this_machine(),
        prompts=len(ids),
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
        speedup=rates[True] / rates[False],
        profile=profile,
        calibration=llm.drafter.calibration.kept(),
        gates=kept_gates(llm.drafter),
    )
    sources = Counter(source for stats in found[True] for source in stats.sources)
    rounds = sum(len(stats.rounds) for stats in found[True])
    path = tuned.save(llm.target)
    return Tuning(path, rates[False], rates[True], sources.total() / rounds, dict(sources.most_common()))


def _passes(target: Target) -> dict[str, Any]:
    """Costs of passes as a profile has them, after as many tokens as the model takes."""
    first, *others = dict.fromkeys(min(n, target.context // 2) for n in CONTEXTS)
    widths = [width for width in WIDTHS if width <= target.context // 2]
    found = {n: compare_passes([target], widths, n, REPEATS)[0].timings for n in (first, *others)}
    medians = {n: {width: timing.median for width, timing in timings.items()} for n, timings in found.items()}
    return {
        "context": first,
        "passes": {width: {"median": seconds} for width, seconds in medians.pop(first).items()},
        "contexts": medians,
    }


def _fits(llm: LLM, prompt: int, new: int) -> bool:
    try:
        llm.target.check_fits(prompt, new)
    except ContextOverflow:
        return False
    return True


def _rate(found: Sequence[Stats]) -> float:
    """Tokens a second of all rounds."""
    return sum(stats.tokens for stats in found) / sum(sum(stats.split.values()) for stats in found)
