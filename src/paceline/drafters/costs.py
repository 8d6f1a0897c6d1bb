"""What a target pass costs on this machine, as a function of its width, and what drafting adds to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import cycle, islice
from weakref import WeakKeyDictionary

import numpy as np
import torch

from paceline.drafters.base import AutoregressiveDrafter, Drafter
from paceline.registry import require
from paceline.targets.span import Span
from paceline.targets.target import Target

WIDTHS = (1, 2, 4, 8, 16, 32)
CONTEXT = 64  # tokens in front of the passes that are measured
DRAFTED, ROUNDS = (0, 1, 2, 4), 6  # tokens of the rounds by which drafting is measured, and rounds of each
TURNS, ENOUGH = 8, 0.4  # measurements of each width, or at least two in so many seconds


class Costs:
    """T(k), seconds of a target pass over k tokens (or of a round that drafts k), from measurements at some widths.

    What measures as more than a wider pass is noise, which only ever adds. Between widths and beyond the last one,
    straight lines.
    """

    def __init__(self, passes: Mapping[int, float]) -> None:
        widths = sorted(passes)
        require(len(widths) > 1, "costs need at least two widths")
        self.widths = np.array(widths, float)
        self.seconds = np.minimum.accumulate([passes[width] for width in reversed(widths)])[::-1]
        slopes = np.diff(self.seconds) / np.diff(self.widths)
        self.slope = float(slopes.min())  # what one more token costs at least
        self._last_slope = float(slopes[-1])
        self._known: dict[int, float] = {}

    def __call__(self, width: int) -> float:
        if width not in self._known:
            beyond = max(width - float(self.widths[-1]), 0.0)
            self._known[width] = float(np.interp(width, self.widths, self.seconds)) + beyond * self._last_slope
        return self._known[width]


#: Costs by target, measured once in a process.
_known: WeakKeyDictionary[Target, Costs] = WeakKeyDictionary()


def set_costs(target: Target, costs: Costs) -> None:
    """Take these for the target's costs, whatever they really are: for replays and simulations."""
    _known[target] = costs


def costs_of(target: Target) -> Costs:
    """The costs of the target's passes, batch 1: from its stored profile, else measured now, in half a second or so."""
    if target not in _known:
        from paceline.profiling import stored_passes  # which imports the engine, and that the drafters

        _known[target] = Costs(stored_passes(target) or _measure(target))
    return _known[target]


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
    from paceline.decoding.engine import Engine  # which imports the drafters
    from paceline.decoding.replay import Replay
    from paceline.policies.fixed import Fixed

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


@torch.inference_mode()
def _measure(target: Target) -> dict[int, float]:
    """The least that each width took: what it takes when nothing else wants the machine."""
    context = min(CONTEXT, target.context // 2)
    widths = [width for width in WIDTHS if context + width <= target.context]
    ids = torch.zeros(1, max(widths), dtype=torch.long, device=target.device)
    cache = target.new_cache(1, context + max(widths))
    target.prefill([0] * context, cache)
    seconds = dict.fromkeys(widths, float("inf"))
    started, turns = time.perf_counter(), 0
    while turns < 2 or (turns < TURNS and time.perf_counter() - started < ENOUGH):
        for width in widths:
            span = Span(ids[:, :width], cache.lengths.copy())
            before = time.perf_counter()
            target.forward(span, cache).logits[0, -1, 0].item()  # an answer: the device is done then
            seconds[width] = min(seconds[width], time.perf_counter() - before)
        turns += 1
    return seconds
