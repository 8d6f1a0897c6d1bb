"""What passes of a target cost on this machine: as a profile has stored it, or measured in a moment."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from paceline.errors import first_line
from paceline.files import read_json
from paceline.targets import store
from paceline.targets.cost_model import Costs, LearnedCosts
from paceline.targets.identity import model_key
from paceline.targets.logits import argmax
from paceline.targets.machine import this_machine
from paceline.targets.span import Span

if TYPE_CHECKING:
    from paceline.targets.target import Target

WIDTHS = (*range(1, 9), 10, 12, 16, 20, 24, 32, 48, 64)
NEAR, FAR = 64, 768  # tokens in the cache of the passes that are measured
CONTEXTS = (NEAR, 256, FAR)  # of a profile
LIMIT = 0.2  # seconds that measuring may take
TURNS = 3  # measurements of each width, if there is time
#: Where measuring begins: what is left out when time is short lies between, or is learned.
FIRST = (1, 8, 4, 2, 16)
#: A guess at what bytes and operations take, where a single pass would take too long to measure.
BANDWIDTH, OPERATIONS = {"cpu": 20e9}, {"cpu": 2e11}
ANY_BANDWIDTH, ANY_OPERATIONS = 1e12, 1e14

log = logging.getLogger("paceline")

#: By target, and by drafter where its own rounds were measured; of plain requests, and of others, where a token takes
#: longer: it is drawn, or processors change its logits. Engines add what they see.
_known: dict[bool, WeakKeyDictionary[object, Costs]] = {True: WeakKeyDictionary(), False: WeakKeyDictionary()}


def known_costs(of: object, plain: bool = True) -> Costs | None:
    """What is known of a target's passes, or of a drafter's rounds; None as long as nobody has asked.

    Args:
        plain: of plain requests, or of others: see `Request.plain`.
    """
    return _known[plain].get(of)


def set_costs(of: object, costs: Costs, plain: bool = True) -> Costs:
    """Take these for the costs of a target's passes, or of a drafter's rounds; those of others start anew from them."""
    _known[plain][of] = costs
    if plain:
        _known[False].pop(of, None)
    return costs


def costs_of(target: Target, plain: bool = True) -> Costs:
    """The costs of the target's passes: from its stored profile, or measured now, in little more than `LIMIT`. Those of
    requests that are not plain start from what is known of the others.
    """
    if known := known_costs(target, plain):
        return known
    with target.turns:  # another thread may have measured them meanwhile
        if plain:
            return known_costs(target) or set_costs(target, stored_costs(target) or measure_costs(target))
        return known_costs(target, plain) or set_costs(target, costs_of(target).anew(), plain)


@torch.inference_mode()
def measure_costs(target: Target, limit: float = LIMIT) -> Costs:
    """The least that passes of some widths took: what they take when nothing else wants the machine.

    Args:
        limit: seconds it may take. Of a model whose single pass takes longer, nothing is measured: costs start from a
            guess, and engines learn them.
    """
    guess = _guess(target)
    if 3 * guess(1) > limit:
        return guess
    started = time.perf_counter()
    near = min(NEAR, target.context // 2)
    widths = [width for width in WIDTHS if near + width <= target.context]
    if len(widths) < 2:
        return guess
    far = max(near, min(FAR, target.context - max(widths), int(target.weight_bytes / 4 // _slot_bytes(target))))
    cache = target.new_cache(1, far + max(widths))
    for part in cache.tensors:
        part.zero_()  # any numbers will do, but in memory of their own
    ids = torch.zeros(1, max(widths), dtype=torch.long, device=target.device)
    order = [(near, width) for width in (*FIRST, *widths) if width in widths]
    order = list(dict.fromkeys([*order[: len(FIRST)], *((far, width) for width in (1, 8) if width in widths), *order]))
    seconds: dict[int, dict[int, float]] = {near: {}, far: {}}
    longest = 0.0
    for _ in range(TURNS):
        for context, width in order:
            if len(seconds[near]) > 1 and time.perf_counter() - started + longest > limit:
                break
            took = _pass_seconds(target, cache, ids[:, :width], context)
            best = seconds[context]
            if width not in best:  # the first one wakes threads and fetches code
                took = min(took, _pass_seconds(target, cache, ids[:, :width], context))
            longest = max(longest, 2 * took)
            best[width] = min(best.get(width, took), took)
    if not seconds[far]:  # there was no time for it
        return LearnedCosts(seconds[near], context=near, read=guess.read)
    return LearnedCosts.fitted(seconds)


def _pass_seconds(target: Target, cache: Any, ids: torch.Tensor, context: int) -> float:
    cache.clear()
    cache.lengths[:] = context
    span = Span(ids, cache.lengths.copy())
    before = time.perf_counter()
    out = target.forward_greedy(span, cache)
    if out.likeliest is None:
        argmax(out.logits[0, -1])  # an answer: the device is done then
    return time.perf_counter() - before


def _slot_bytes(target: Target) -> int:
    """Of a token's keys and values, in layers whose tokens see all of them."""
    if target.layout or not target.takes_back:
        whole = [shape for shape in target.layout.values() if shape.reach.window is None]
        numbers = sum(math.prod(shape.keys) + math.prod(shape.values) for shape in whole)
        return max(1, numbers * target.dtype.itemsize)
    shape = target.cache_shape()
    layers = target.windows.count(0) if target.windows else shape.layers
    return max(1, 2 * layers * shape.kv_heads * shape.head_dim * target.dtype.itemsize)


def _guess(target: Target) -> Costs:
    kind = target.device.type
    bandwidth, token = (
        BANDWIDTH.get(kind, ANY_BANDWIDTH),
        2 * target.weight_count / OPERATIONS.get(kind, ANY_OPERATIONS),
    )
    passes = {width: target.weight_bytes / bandwidth + width * token for width in WIDTHS}
    return LearnedCosts(passes, context=NEAR, read=_slot_bytes(target) / bandwidth)


def stored_costs(target: Target) -> Costs | None:
    """From the profile that was saved of this target; None when there is none, or none that can be read."""
    found = stored_passes(target)
    return LearnedCosts.fitted(found) if found else None


def stored_passes(target: Target) -> dict[int, dict[int, float]] | None:
    """Median seconds of a pass by context and width, as in the saved profile of this target; None as `stored_profile`
    says.
    """
    profile = stored_profile(target)
    return read_passes(profile) if profile else None


def stored_profile(target: Target) -> dict[str, Any] | None:
    """What `paceline profile` saved of this target; None when there is nothing, or with a warning what is damaged or
    of another machine.
    """
    path = settings_path("profiles", target)
    try:
        profile: dict[str, Any] = read_json(path.read_text(encoding="utf-8"))
        if (machine := profile.get("machine", this_machine())) != this_machine():
            raise ValueError(f"it was measured on another machine, {machine}")
        read_passes(profile)
        return profile
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("The profile %s is not used (%s): costs are measured anew.", path, fault(error))
        return None


def fault(error: Exception) -> str:
    """What is wrong with a stored file, in a few words."""
    if isinstance(error, KeyError):
        return f"it has no {error}"
    if isinstance(error, json.JSONDecodeError | TypeError | AttributeError):
        return "it is damaged"
    return first_line(error)


def settings_path(folder: str, target: Target) -> Path:
    """The file for this target's settings in a folder of the store."""
    dtype = str(target.compute_dtype).removeprefix("torch.")
    key, threads = model_key(target), torch.get_num_threads()
    path = profile_path(key, str(target.device), dtype, target.exact, target.tier, threads)
    return path.parents[1] / folder / path.name


def read_passes(profile: Mapping[str, Any]) -> dict[int, dict[int, float]]:
    """Median seconds by context and width, of a profile as it is stored: its own context first.

    Raises KeyError, TypeError, ValueError or AttributeError for what is no profile.
    """
    try:
        found = {int(profile["context"]): {int(w): float(timing["median"]) for w, timing in profile["passes"].items()}}
        for context, passes in profile.get("contexts", {}).items():
            found.setdefault(int(context), {int(width): float(seconds) for width, seconds in passes.items()})
    except OverflowError as error:
        raise ValueError("a profile's numbers are finite") from error
    if not all(0 < seconds < np.inf for passes in found.values() for seconds in passes.values()):
        raise ValueError("seconds of a pass are above 0")
    if min(map(len, found.values())) < 2:
        raise ValueError("a profile has two widths or more")
    return found


def profile_path(key: str, device: str, dtype: str, exact: bool, tier: str, threads: int) -> Path:
    settings = key, device, dtype, "exact" if exact else "inexact", tier, str(threads)
    name = "-".join(re.sub(r"[^\w.-]+", "-", setting).strip("-.") for setting in settings)
    return store.root() / "profiles" / f"{name}.json"
