"""What a target pass costs on this machine, as a function of its width: measured now, or stored by a profile."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch

from paceline.errors import require
from paceline.targets import store
from paceline.targets.identity import model_key
from paceline.targets.span import Span

if TYPE_CHECKING:
    from paceline.targets.target import Target

WIDTHS = (1, 2, 4, 8, 16, 32)
CONTEXT = 64  # tokens in front of the passes that are measured
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
        _known[target] = Costs(stored_passes(target) or _measure(target))
    return _known[target]


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


def stored_passes(target: Target) -> dict[int, float] | None:
    """Median seconds of a pass by width, from the profile that was saved of this target; None when there is none."""
    dtype = str(target.dtype).removeprefix("torch.")
    path = profile_path(
        model_key(target), str(target.device), dtype, target.exact, target.tier, torch.get_num_threads()
    )
    try:
        passes = json.loads(path.read_text(encoding="utf-8"))["passes"]
        return {int(width): float(timing["median"]) for width, timing in passes.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def profile_path(key: str, device: str, dtype: str, exact: bool, tier: str, threads: int) -> Path:
    settings = key, device, dtype, "exact" if exact else "inexact", tier, str(threads)
    name = "-".join(re.sub(r"[^\w.-]+", "-", setting).strip("-.") for setting in settings)
    return store.root() / "profiles" / f"{name}.json"
