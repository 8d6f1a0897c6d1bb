"""Drafters on a known text: a request goes on as the text does, so that what it costs to draft, and how much of it is
accepted, can be seen without waiting for a target, and one text judges all drafters and policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from paceline.decoding.engine import Engine
from paceline.decoding.request import Request
from paceline.errors import OptionError
from paceline.profiling.rounds import ready
from paceline.targets.cache import CacheShape, KVCache
from paceline.targets.context import ENDLESS
from paceline.targets.turns import Turns

if TYPE_CHECKING:
    from paceline.decoding.stats import Stats
    from paceline.drafting.base import Drafter
    from paceline.policies.base import StoppingPolicy
    from paceline.targets.target import Target


def replay(
    drafter: Drafter,
    prompt: Sequence[int],
    output: Sequence[int],
    policy: StoppingPolicy,
    *,
    target: Target | None = None,
    seed: int = 0,
) -> Stats:
    """The rounds that `drafter` goes through while a target says `output`.

    Args:
        target: reads the text along, for drafters and policies that need more of it than tokens; None: there is no
            target, and nothing is computed but the drafts.
        seed: of the policy's random choices.

    Raises:
        OptionError: there is no target, and the drafter or the policy needs more of it than its tokens.
    """
    ready(policy, drafter, hidden=target is not None)
    request = Request(prompt, limit=len(output), policy=policy, seed=seed, script=output)
    engine = _WithoutTarget(drafter) if target is None else Engine(target, drafter)
    for _ in engine.run([request]):
        pass
    return request.stats


class _WithoutTarget(Engine):
    """Rounds that compute nothing but the drafts."""

    def __init__(self, drafter: Drafter) -> None:
        target: Any = _NoTarget()
        super().__init__(target, drafter)

    def _start_drafter(self, cache: KVCache) -> None:
        self.drafter.start(_NOTHING)  # one that reads the target's cache says so


class _NoTarget:
    """Stands in the engine for a target that computes nothing: its cache has lengths only."""

    device, num_layers, chains_only, name = torch.device("cpu"), 0, False, "a replay"
    border, ends_early, packs, foreign, draw = ENDLESS, False, False, False, None
    turns = Turns()

    def check_fits(self, prompt: int, new: int) -> None:
        """Any text does."""

    def new_cache(self, rows: int, slots: int) -> KVCache:
        return KVCache.allocate(CacheShape(0, 1, 1), rows, slots, torch.float32, self.device)

    def prefill(self, ids: Sequence[int], cache: KVCache, taps: object = ()) -> Any:
        cache.lengths += len(ids)
        return _NOTHING

    def forward(self, *_: object) -> _NoOutput:
        return _NoOutput()

    forward_greedy = forward


class _NoOutput:
    """Stands for what a pass gives."""

    logits = likeliest = None

    def row(self, row: int, width: int) -> Any:
        return _NOTHING


class _Nothing:
    """Stands for the target's cache, hidden states and logits, of which there are none."""

    def __getattr__(self, name: str) -> Any:
        raise OptionError(f"this drafter reads the target's {name}: it can be replayed with the target only")

    def __getitem__(self, tap: int) -> Any:
        raise OptionError(
            f"this drafter reads what enters the target's layer {tap}: it can be replayed with the target only"
        )


_NOTHING: Any = _Nothing()
