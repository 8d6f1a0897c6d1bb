"""What a round costs, by how many tokens it drafts and verifies."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, islice
from weakref import WeakKeyDictionary

from paceline.decoding.engine import Engine
from paceline.drafting.autoregressive import AutoregressiveDrafter
from paceline.drafting.base import Drafter
from paceline.policies.fixed import Fixed
from paceline.profiling.replay import Replay
from paceline.targets.costs import CONTEXT, Costs, costs_of

DRAFTED, ROUNDS = (0, 1, 2, 4), 6  # tokens of the rounds by which drafting is measured, and rounds of each

#: By drafter, measured once in a process.
_known_drafts: WeakKeyDictionary[Drafter, Costs] = WeakKeyDictionary()


def draft_costs(drafter: Drafter) -> Costs:
    """Seconds of a round by what it drafts and verifies, batch 1. Drafters without a model draft in no time."""
    if drafter not in _known_drafts:
        seconds = _measure_rounds(drafter) if isinstance(drafter, AutoregressiveDrafter) else {}
        if len(seconds) < 2:  # nor does one that drafts nothing, as where a tree's budget allows no node
            passes = costs_of(drafter.target)
            seconds = {int(width) - 1: passes(int(width)) for width in passes.widths}
        _known_drafts[drafter] = Costs(seconds)
    return _known_drafts[drafter]


def round_cost(drafter: Drafter) -> Callable[[int], float]:
    """What a round costs by what it drafts and verifies, in rounds without a draft."""
    costs = draft_costs(drafter)
    return lambda drafted: costs(drafted) / costs(0)


def _measure_rounds(drafter: Drafter) -> dict[int, float]:
    """The least seconds of rounds by what they draft. They take turns, so that other work on the machine slows all."""

    class ByTurns(Fixed):
        length = cycle([*DRAFTED, *DRAFTED[::-1]])  # behind other rounds each time: some leave work for the next
        wanted = next(length)

        def more(self, depth: int) -> bool:
            return depth < self.wanted

        def observe(self, drafted: int, accepted: int) -> None:
            self.wanted = next(self.length)

    new = ROUNDS * sum(1 + drafted for drafted in DRAFTED)
    prompt = max(1, min(CONTEXT, drafter.target.context - new))
    request = Replay([0] * prompt, [0] * new, ByTurns(k=max(DRAFTED)))
    for _ in islice(Engine(drafter.target, drafter).run([request]), ROUNDS * len(DRAFTED)):
        pass
    least: dict[int, float] = {}
    for record in request.stats.rounds:
        seconds = record.seconds["draft"] + record.seconds["verify"]
        least[record.depth] = min(least.get(record.depth, seconds), seconds)
    return least
