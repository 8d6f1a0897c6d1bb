"""A profile: everything measured of one target on one machine, kept in the cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.errors import require
from paceline.files import whole
from paceline.profiling.roofline import Roofline, measure_roofline, pass_cost
from paceline.profiling.timing import Passes, Timing, compare_drafts, compare_passes
from paceline.targets import Target, store
from paceline.targets.costs import CONTEXTS, WIDTHS, profile_path
from paceline.targets.identity import model_key
from paceline.targets.machine import this_machine
from paceline.version import __version__

if TYPE_CHECKING:
    from paceline.drafting.base import Drafter


FEWER = 3  # so many times fewer measurements of other contexts


@dataclass(frozen=True)
class PassProfile(Timing):
    """T(k), what the pass needs (see `PassCost`), and `floor`, the least seconds it could take by the roofline."""

    weight_bytes: int
    cache_bytes: int
    flops: int
    floor: float


@dataclass(frozen=True)
class Profile:
    """Everything measured of one target, and on what.

    Attributes:
        model: as it was named, for reports; `key` as `model_key` has it.
        exact, exactness: as of the target.
        noise: largest difference of a logit of the same token between widths, as measured; 0 if the target is exact.
        passes: by width k, one pass over k new tokens after `context` committed ones, batch 1.
        contexts: medians by width after other numbers of committed tokens, by that number.
        drafts: by drafter, one drafted token. None: it proposed nothing on the text it was measured on.
    """

    model: str
    key: str
    tier: str
    device: str
    dtype: str
    threads: int
    context: int
    exact: bool
    exactness: str
    noise: float
    roofline: Roofline
    passes: dict[int, PassProfile]
    drafts: dict[str, Timing | None] = field(default_factory=dict)
    contexts: dict[int, dict[int, float]] = field(default_factory=dict)
    machine: str = field(default_factory=this_machine)
    versions: dict[str, str] = field(default_factory=lambda: {"paceline": __version__, "torch": torch.__version__})
    measured: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def path(self) -> Path:
        """Where `save` puts it: a file for each of the settings that costs depend on."""
        return profile_path(self.key, self.device, self.dtype, self.exact, self.tier, self.threads)

    def save(self) -> Path:
        """Write it, whole or not at all. Raises ModelError when the cache cannot be written."""
        with store.disk_errors(self.path.parent), whole(self.path) as partial:
            partial.write_text(json.dumps(self.as_dict(), indent=1), encoding="utf-8")
        return self.path


def measure(
    targets: Sequence[Target],
    model: str,
    *,
    context: int = 256,
    repeats: int = 15,
    drafters: Mapping[str, Callable[[Target], Drafter]] | None = None,
    widths: Sequence[int] = WIDTHS,
    contexts: Sequence[int] = CONTEXTS,
) -> list[Profile]:
    """Profile targets of one model, such as its tiers, side by side.

    Args:
        model: the name to report.
        context: committed tokens in front of every pass.
        drafters: what makes each drafter, by the name to report it under.
        contexts: other numbers of such tokens, measured with fewer repeats where they fit the models: what costs are
            made of besides.

    Raises:
        ContextOverflow: context and pass do not fit the model's.
        OptionError: context or repeats below 1.
    """
    require(context >= 1, f"context must be at least 1 token, not {context}")
    require(repeats >= 1, f"repeats must be at least 1, not {repeats}")
    for target in targets:
        target.check_fits(context, max(widths))
    before = {kind: measure_roofline(*kind) for kind in set(map(_arithmetic, targets))}
    passes = compare_passes(targets, widths, context, repeats)
    fitting = [n for n in contexts if n != context and all(n + max(widths) <= target.context for target in targets)]
    further = {n: compare_passes(targets, widths, n, -(-repeats // FEWER)) for n in fitting}
    names = list(drafters or {})
    made = [make(target) for target in targets for make in (drafters or {}).values()]
    drafts = iter(compare_drafts(made, context, repeats))
    roofs = {kind: measure_roofline(*kind).or_better(roof) for kind, roof in before.items()}
    made_profiles = []
    for at, target in enumerate(targets):
        own = {name: next(drafts) for name in names}
        profile = _assemble(target, model, context, passes[at], own, roofs[_arithmetic(target)])
        for n, found in further.items():
            profile.contexts[n] = {width: timing.median for width, timing in found[at].timings.items()}
        made_profiles.append(profile)
    return made_profiles


def _arithmetic(target: Target) -> tuple[torch.device, torch.dtype]:
    return target.device, target.compute_dtype


def _assemble(
    target: Target, model: str, context: int, passes: Passes, drafts: dict[str, Timing | None], roof: Roofline
) -> Profile:
    costs = {width: pass_cost(target, width, context, greedy=True) for width in passes.timings}
    return Profile(
        model=model,
        key=model_key(target),
        tier=target.tier,
        device=str(target.device),
        dtype=str(target.compute_dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        context=context,
        exact=target.exact,
        exactness=target.exactness,
        noise=passes.noise,
        roofline=roof,
        passes={
            width: PassProfile(**vars(timing), **vars(costs[width]), floor=roof.floor(costs[width]))
            for width, timing in passes.timings.items()
        },
        drafts=drafts,
    )
