"""Seconds of target passes and of drafting. Everything measured takes turns, so that a machine whose speed drifts is
unfair to none.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.decoding.engine import Engine
from paceline.decoding.request import Request
from paceline.policies.fixed import Fixed
from paceline.targets.span import Span

if TYPE_CHECKING:
    from paceline.drafting.base import Drafter
    from paceline.targets import Target

WARM_UP = 2
DRAFT_LENGTH = 5


@dataclass(frozen=True)
class Timing:
    """Seconds: median and quartiles of `repeats` measurements."""

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        low, median, high = np.percentile(seconds, (25, 50, 75)).tolist()
        return cls(median, low, high, len(seconds))


class Passes(NamedTuple):
    """The passes of one target.

    Attributes:
        timings: by width.
        noise: largest difference of a logit of the first token between widths; 0 when they have the same bits.
    """

    timings: dict[int, Timing]
    noise: float


def time_passes(target: Target, widths: Sequence[int], context: int, repeats: int) -> dict[int, Timing]:
    """T(k) for each width, after `context` committed tokens, batch 1; all must fit the model's context."""
    return compare_passes([target], widths, context, repeats)[0].timings


@torch.inference_mode()
def compare_passes(targets: Sequence[Target], widths: Sequence[int], context: int, repeats: int) -> list[Passes]:
    """The passes of each target, as `time_passes` measures them.

    A target's turn goes down through the widths and up again, so that a pass follows one of nearly its own width, as it
    does in decoding: caches and clocks that another target or a wide pass has left behind need some passes to settle.
    """
    lanes, turns = [_Lane(target, widths, context) for target in targets], WARM_UP + repeats
    for turn in range(0, turns, 2):
        for lane in lanes:
            for one in range(turn, min(turn + 2, turns)):
                for width in sorted(widths, reverse=one % 2 == 0):
                    lane.run(width, timed=one >= WARM_UP)
    return [
        Passes({width: Timing.of(seconds) for width, seconds in lane.seconds.items()}, lane.noise) for lane in lanes
    ]


class _Lane:
    """One target's passes, all over the same text."""

    def __init__(self, target: Target, widths: Sequence[int], context: int) -> None:
        ids = _text(target, context + max(widths))
        self.target, self.cache = target, target.new_cache(1, len(ids))
        target.prefill(ids[:context], self.cache)
        self.ids = torch.tensor([ids[context:]], device=target.device)
        self.seconds: dict[int, list[float]] = {width: [] for width in widths}
        self.first: Tensor | None = None
        self.noise = 0.0

    def run(self, width: int, timed: bool) -> None:
        span = Span(self.ids[:, :width], self.cache.lengths.copy())
        wait(self.target.device)
        started = time.perf_counter()
        out = self.target.forward_greedy(span, self.cache)
        wait(self.target.device)
        if timed:
            self.seconds[width].append(time.perf_counter() - started)
        elif self.first is None:
            self.first = out.logits[0, 0]
        else:
            self.noise = max(self.noise, float((out.logits[0, 0] - self.first).abs().max()))


def compare_drafts(drafters: Sequence[Drafter], context: int, repeats: int) -> list[Timing | None]:
    """Of each drafter, on its own target: seconds a drafted token, in rounds that draft a fixed length; None when it
    proposed nothing.
    """
    rounds = WARM_UP + repeats
    requests, running = [], []
    for drafter in drafters:
        target = drafter.target
        text = _text(target, min(context + rounds * (DRAFT_LENGTH + 1), target.context))
        output = text[context:]
        policy = Fixed(k=DRAFT_LENGTH)
        requests.append(Request(text[:context], limit=len(output), policy=policy, script=output))
        running.append(Engine(target, drafter).run(requests[-1:]))
    for _ in range(rounds):
        for engine in running:
            next(engine, None)
    return [_seconds_a_token(request) for request in requests]


def _seconds_a_token(request: Request) -> Timing | None:
    drafted = [round for round in request.stats.rounds[WARM_UP:] if round.depth]
    return Timing.of([round.seconds["draft"] / round.depth for round in drafted]) if drafted else None


def _text(target: Target, length: int) -> list[int]:
    """Token ids that repeat every 32, so that drafters which copy find something to copy."""
    period = torch.randint(target.vocab_size, (32,), generator=torch.Generator().manual_seed(0)).tolist()
    return (period * (length // len(period) + 1))[:length]


def wait(device: torch.device) -> None:
    """Until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
