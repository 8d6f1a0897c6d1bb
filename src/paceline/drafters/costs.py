"""What a target pass costs on this machine, as a function of its width."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import islice
from weakref import WeakKeyDictionary

import numpy as np
import torch

from paceline.drafters.base import AutoregressiveDrafter, Drafter
from paceline.registry import require
from paceline.targets.span import Span
from paceline.targets.target import Target

WIDTHS = (1, 2, 4, 8, 16, 32)
CONTEXT = 64  # tokens in front of the passes that are measured
ROUNDS, DRAFTED = 8, 4  # of the measurement of what one drafted token costs, as many rounds without
TURNS, ENOUGH = 8, 0.4  # measurements of each width, or at least two in so many seconds


class Costs:
    """T(k), seconds of a target pass over k tokens, from measurements at some widths.

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
_known_steps: WeakKeyDictionary[Drafter, float] = WeakKeyDictionary()


def step_cost(drafter: Drafter) -> float:
    """Of drafting and verifying one more token, in target passes of one token, batch 1. Drafters without a model draft
    for nothing."""
    if drafter not in _known_steps:
        plain, drafting, depth = (
            _measure_rounds(drafter) if isinstance(drafter, AutoregressiveDrafter) else (0.0, 0.0, 0)
        )
        if not depth:  # nor where a tree's budget allows no node
            costs = costs_of(drafter.target)
            plain, drafting, depth = costs(1), costs(1 + DRAFTED), DRAFTED
        _known_steps[drafter] = max(drafting - plain, 0.0) / depth / plain
    return _known_steps[drafter]


def _measure_rounds(drafter: Drafter) -> tuple[float, float, int]:
    """The least seconds of a round that drafts nothing and of one that drafts, and how much this one drafts. They take
    turns, so that other work on the machine slows both."""
    from paceline.decoding.engine import Engine  # which imports the drafters
    from paceline.decoding.replay import Replay
    from paceline.policies.fixed import Fixed

    class ByTurns(Fixed):
        drafts = False

        def more(self, depth: int) -> bool:
            return self.drafts and super().more(depth)

        def observe(self, drafted: int, accepted: int) -> None:
            self.drafts = not self.drafts

    new = (1 + DRAFTED + 1) * ROUNDS
    prompt = max(1, min(CONTEXT, drafter.target.context - new))
    request = Replay([0] * prompt, [0] * new, ByTurns(k=DRAFTED))
    for _ in islice(Engine(drafter.target, drafter).run([request]), 2 * ROUNDS):
        pass
    least: dict[int, float] = {}
    for record in request.stats.rounds:
        seconds = record.seconds["draft"] + record.seconds["verify"]
        least[record.depth] = min(least.get(record.depth, seconds), seconds)
    depth = max(least)
    return least[0], least[depth], depth


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
