"""What a target pass and a draft step cost on this machine: measured, and kept in the cache."""

from __future__ import annotations

import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from paceline.decoding.engine import Engine
from paceline.decoding.request import Request
from paceline.decoding.verify import Outcome, walk
from paceline.drafters.base import Drafter
from paceline.drafters.tree import TokenTree
from paceline.policies.fixed import Fixed
from paceline.registry import require
from paceline.targets import Target, store
from paceline.targets.span import Span
from paceline.version import __version__

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
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


@dataclass(frozen=True)
class Profile:
    """T(k) of one target on one machine, and what its drafters cost.

    Attributes:
        passes: by width k, one pass over k new tokens behind `context` committed ones, batch 1.
        drafts: by drafter, one drafted token. None: it proposed nothing on the text it was measured on.
    """

    model: str
    tier: str
    device: str
    dtype: str
    threads: int
    context: int
    passes: dict[int, Timing]
    drafts: dict[str, Timing | None] = field(default_factory=dict)
    machine: str = field(default_factory=lambda: f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs")
    versions: dict[str, str] = field(default_factory=lambda: {"paceline": __version__, "torch": torch.__version__})
    measured: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def path(self) -> Path:
        """Where `save` puts it: one file for each model, tier and number of threads."""
        name = re.sub(r"[^\w.-]+", "-", self.model).strip("-.")
        return store.root() / "profiles" / f"{name}-{self.tier}-{self.threads}.json"

    def save(self) -> Path:
        """Write it, whole or not at all. Raises ModelError when the cache cannot be written."""
        with store.disk_errors(self.path.parent):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, suffix=".partial", delete=False) as file:
                try:
                    json.dump(self.as_dict(), file, indent=1)
                    file.close()
                    os.replace(file.name, self.path)
                except BaseException:
                    os.unlink(file.name)
                    raise
        return self.path


def measure(
    target: Target,
    model: str,
    *,
    context: int = 256,
    repeats: int = 15,
    drafters: dict[str, Callable[[Target], Drafter]] | None = None,
    done: Callable[[str], None] = lambda what: None,
) -> Profile:
    """Profile a target, under the name `model`.

    Args:
        context: committed tokens in front of every pass.
        drafters: what makes each drafter, by the name to report it under.
        done: called with what has been measured after each part.

    Raises:
        ContextOverflow: context and pass do not fit the model's.
        OptionError: context or repeats below 1.
    """
    require(context >= 1, f"context must be at least 1 token, not {context}")
    require(repeats >= 1, f"repeats must be at least 1, not {repeats}")
    passes = time_passes(target, WIDTHS, context, repeats)
    done("passes")
    drafts = {}
    for name, make in (drafters or {}).items():
        drafts[name] = time_drafts(target, make(target), context, repeats)
        done(name)
    return Profile(
        model=model,
        tier=target.tier,
        device=str(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        context=context,
        passes=passes,
        drafts=drafts,
    )


@torch.inference_mode()
def time_passes(target: Target, widths: Sequence[int], context: int, repeats: int) -> dict[int, Timing]:
    """T(k) for each width; the widths take turns, so that a machine whose speed drifts slows all alike."""
    target.check_fits(context, max(widths))
    ids = _text(target, context + max(widths))
    cache = target.new_cache(1, len(ids))
    target.prefill(ids[:context], cache)
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for repeat in range(WARM_UP + repeats):
        for width in widths:
            span = Span(torch.tensor([ids[context : context + width]], device=target.device), cache.lengths.copy())
            _wait(target)
            started = time.perf_counter()
            target.forward(span, cache)
            _wait(target)
            if repeat >= WARM_UP:
                seconds[width].append(time.perf_counter() - started)
    return {width: Timing.of(samples) for width, samples in seconds.items()}


def time_drafts(target: Target, drafter: Drafter, context: int, repeats: int) -> Timing | None:
    """Seconds a drafted token, in rounds that draft a fixed length; None when the drafter proposed nothing."""
    rounds = WARM_UP + repeats
    text = _text(target, min(context + rounds * (DRAFT_LENGTH + 1), target.context))
    request = _Replay(text, context)
    for _ in Engine(target, drafter).run([request]):
        if len(request.stats.rounds) == rounds:
            break
    drafted = [round for round in request.stats.rounds[WARM_UP:] if round.depth]
    return Timing.of([round.seconds["draft"] / round.depth for round in drafted]) if drafted else None


class _Replay(Request):
    """A request that continues as a given text does, whatever the target thinks of it: what a drafter is asked then
    does not depend on the model."""

    def __init__(self, text: list[int], prompt: int) -> None:
        super().__init__(text[:prompt], limit=len(text) - prompt, policy=Fixed(k=DRAFT_LENGTH))
        self.whole = text

    @property
    def plain(self) -> bool:
        return False

    def verify(self, tree: TokenTree, logits: Float[Tensor, "nodes vocab"]) -> Outcome:
        return walk(tree, [self.whole[len(self.ids) + depth] for depth in tree.depths])


def _text(target: Target, length: int) -> list[int]:
    """Token ids that repeat every 32, so that drafters which copy find something to copy."""
    period = torch.randint(target.vocab_size, (32,), generator=torch.Generator().manual_seed(0)).tolist()
    return (period * (length // len(period) + 1))[:length]


def _wait(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
