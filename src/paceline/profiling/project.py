"""Projections: the rounds that methods would go through on the texts of a trace, under any costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING, Any

from paceline.clock import MadeUpClock, made_up
from paceline.decoding.engine import Engine
from paceline.decoding.request import Request
from paceline.drafters import DRAFTERS
from paceline.drafters.auto import Auto
from paceline.drafters.merge import Merge
from paceline.drafters.none import NoDrafter
from paceline.errors import OptionError
from paceline.policies import POLICIES
from paceline.profiling.recorded import FreeSource, PaidSource, Recorded, RecordedTarget
from paceline.profiling.rounds import ready
from paceline.profiling.timing import DRAFT_LENGTH
from paceline.profiling.trace import FREE, PLAIN, Measured, Trace
from paceline.registry import AUTO, split_method
from paceline.targets.cost_model import Costs, LearnedCosts
from paceline.targets.costs import read_passes, set_costs

if TYPE_CHECKING:
    from paceline.drafting.base import Drafter


@dataclass
class Terms:
    """Under what a trace is replayed.

    Attributes:
        name: for reports.
        costs: of passes.
        drafts: seconds a token of a draft of some tokens, by drafter as it was written, where they are known.
        speed: seconds of this profile's plain pass for one of the trace's: those of levels that are not.
    """

    name: str
    costs: Costs
    drafts: dict[str, float] = field(default_factory=dict)
    speed: float = 1.0


def terms_of(name: str, profile: Mapping[str, Any], trace: Trace) -> Terms:
    """Of a stored profile. Raises OptionError for what is none."""
    own = _costs(trace.header.profile)
    try:
        costs, known = _costs(profile), (profile.get("drafts") or {}).items()
        drafts = {name: float(timing["median"]) for name, timing in known if timing}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise OptionError(f"{name} is not a profile of paceline profile, or it is damaged") from error
    return Terms(name, costs, drafts, costs(1) / own(1))


def _costs(profile: Mapping[str, Any]) -> Costs:
    """As they stand, not to be learned: what another context adds is fitted."""
    passes = read_passes(profile)
    fitted, (context, first) = LearnedCosts.fitted(passes), next(iter(passes.items()))
    return Costs(first, context=context, read=fitted.read, score=fitted.score)


def project(trace: Trace, method: str, terms: Terms) -> dict[str, Measured]:
    """By task, what the method would take for the texts of the trace. The same every time: nothing is measured.

    Args:
        method: "ar", a drafter that was traced, or `auto` or a merge of such, each with any policy.

    Raises:
        OptionError: it was not traced, or its policy reads hidden states.
    """
    clock = MadeUpClock()
    drafter, policy = _built(trace, method, terms, clock)
    target: Any = drafter.target
    target.overhead += trace.header.choosing.get(method, 0.0)
    engine, sums = Engine(target, drafter), dict[str, Measured]()
    with made_up(clock):
        for text in trace.texts:
            rule = ready(policy.build(), drafter, hidden=False)
            request = Request(text.prompt, limit=len(text.output), policy=rule, seed=text.seed, script=text.output)
            for _ in engine.run([request]):
                pass
            found = sums.setdefault(text.task, Measured())
            found.tokens += request.stats.tokens
            found.rounds += len(request.stats.rounds)
            found.seconds += sum(sum(done.seconds.values()) for done in request.stats.rounds)
    return sums


def check_method(trace: Trace, method: str, terms: Terms) -> None:
    """Raises what `project` would."""
    clock = MadeUpClock()
    drafter, policy = _built(trace, method, terms, clock)
    with made_up(clock):
        ready(policy.build(), drafter, hidden=False)


def _built(trace: Trace, method: str, terms: Terms, clock: MadeUpClock) -> tuple[Drafter, Any]:
    """The drafter that a method names, of recorded sources, and its policy."""
    target: Any = RecordedTarget(trace, terms.costs, clock)
    set_costs(target, terms.costs)
    name, rule = (method, None) if method == PLAIN else split_method(method, POLICIES.__contains__)
    drafter = NoDrafter(target) if name in (PLAIN, "none") else _of_sources(trace, name, target, terms)
    return drafter, POLICIES.parse(rule or drafter.default_policy)


def _of_sources(trace: Trace, name: str, target: Any, terms: Terms) -> Drafter:
    header = trace.header
    if name in header.sources:
        return _source(trace, name, target, terms)
    if name not in header.parts:
        known = ", ".join([*header.sources, *header.parts])
        raise OptionError(f"'{name}' was not traced; this trace has {known}, each with any policy (see bench --trace)")
    parts = [_source(trace, part, target, terms) for part in header.parts[name]]
    spec = DRAFTERS.parse(name)
    options = {key: value for key, value in spec.options.items() if key == "budget"}
    if issubclass(spec.cls, Auto):
        return Auto(target, parts, **options)
    return Merge(target, drafters=parts, **options)  # type: ignore[arg-type]  # from Python it takes drafters


def _source(trace: Trace, name: str, target: Any, terms: Terms) -> Drafter:
    """A stand-in. Look-ups run on the CPU, and cost what they cost there; heads and draft models what the profile says
    of them, or as much more or less as its passes do.
    """
    recorded = Recorded(trace, name, target)
    about = recorded.about
    alone = all(name not in parts for parts in trace.header.parts.values())
    budget = DRAFTERS.parse(name).options.get("budget", AUTO) if alone else AUTO
    if about.kind == FREE:
        return FreeSource(recorded, target, budget)
    levels = about.levels or [0.0]
    known, mean = terms.drafts.get(name, terms.drafts.get(about.name)), fmean(levels[:DRAFT_LENGTH])
    speed = known / mean if known is not None and mean else terms.speed
    recorded.levels = [speed * level for level in levels]
    made = PaidSource(recorded, target, budget)
    rounds = {0: terms.costs(1)}
    for drafted, seconds in enumerate(accumulate(recorded.levels), start=1):
        rounds[drafted] = seconds + about.pass_share * terms.costs(1 + drafted)
    set_costs(made, Costs(rounds))
    return made
