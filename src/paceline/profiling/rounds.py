"""What a round costs, by how many tokens it drafts and verifies; and policies that are told of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary, ref

from paceline.decoding.engine import Engine
from paceline.decoding.request import Request
from paceline.drafting.autoregressive import AutoregressiveDrafter
from paceline.drafting.budget import Calibration
from paceline.policies.base import Setting, StoppingPolicy
from paceline.policies.fixed import Fixed
from paceline.targets.cost_model import Costs, LearnedCosts
from paceline.targets.costs import NEAR, costs_of, known_costs, set_costs
from paceline.targets.identity import model_key

if TYPE_CHECKING:
    from paceline.drafting.base import Drafter

log = logging.getLogger("paceline")

DRAFTED, ROUNDS = (0, 1, 2, 4), 6  # tokens of the rounds by which drafting is measured, and rounds of each

Policy = TypeVar("Policy", bound=StoppingPolicy)

#: Of each drafter, of plain requests and of others: see `Setting.before`.
_before: WeakKeyDictionary[Drafter, dict[bool, dict[type, StoppingPolicy]]] = WeakKeyDictionary()


def ready(policy: Policy, drafter: Drafter, *, hidden: bool = True, plain: bool = True) -> Policy:
    """A policy that has been told where it runs; whatever decodes with one gets it from here.

    What passes and rounds cost is measured if drafter or policy ask for it and nobody has in this process.

    Args:
        hidden: whether hidden states can be shown: False where there is no target to run.
        plain: whether it is for greedy decoding of raw logits. Other rounds take longer, and other tokens are accepted:
            each kind has costs of its own, and begins with what earlier requests of its kind have taught.

    Raises:
        OptionError, CheckpointMismatch: the policy cannot run there.
    """
    if drafter.reads_costs and hidden:
        costs_of(drafter.target)
    setting = setting_of(drafter, hidden=hidden)
    if policy.reads_costs:
        setting = _with_costs(setting, drafter, plain)
        policy.alone = [_with_costs(setting, part, plain) for part in drafter.parts]
    policy.check(setting)
    return policy


def _with_costs(setting: Setting, drafter: Drafter, plain: bool) -> Setting:
    before = _before.setdefault(drafter, {}).setdefault(plain, {})
    return replace(setting, cost=round_cost(drafter, plain), pass_cost=pass_cost(drafter, plain), before=before)


def setting_of(drafter: Drafter, *, hidden: bool = True) -> Setting:
    """Where policies of this drafter run, costs aside; `hidden` as of `ready`."""
    target = drafter.target
    width = target.config.hidden_size if hidden and target.has_blocks else None
    draft_width = drafter.hidden_width if hidden else None
    return Setting(model_key(target), drafter.source, width, draft_width, drafter.predictors)


def round_cost(drafter: Drafter, plain: bool = True) -> Callable[[int], float]:
    """What a round costs by what it drafts and verifies, in rounds without a draft; of as many requests as share it."""
    seconds = _seconds_of_batch(drafter, plain)
    return lambda drafted: seconds(drafted) / seconds(0)


def pass_cost(drafter: Drafter, plain: bool = True) -> Callable[[int], float]:
    """What verifying costs by how many tokens were drafted, in rounds without a draft; no more than the whole round."""
    rounds, passes, sharing = _seconds_of_batch(drafter, plain), costs_of(drafter.target, plain), _sharing(drafter)

    def cost(drafted: int) -> float:
        rows = sharing()
        wider = passes(rows * (1 + drafted), rows=rows) - passes(rows, rows=rows)
        return min(1 + wider / rounds(0), rounds(drafted) / rounds(0))

    return cost


def _seconds_of_batch(drafter: Drafter, plain: bool) -> Callable[[int], float]:
    """Seconds of a round by what each request drafts: rounds were measured of one, and passes are of all together."""
    rounds, passes, sharing = round_seconds(drafter, plain), costs_of(drafter.target, plain), _sharing(drafter)

    def seconds(drafted: int) -> float:
        if (rows := sharing()) == 1:
            return rounds(drafted)
        return max(rounds(drafted) - passes(1 + drafted), 0.0) + passes(rows * (1 + drafted), rows=rows)

    return seconds


def _sharing(drafter: Drafter) -> Callable[[], int]:
    """How many requests share its pass. It keeps no drafter alive: policies that have it are kept by their drafters."""
    known = ref(drafter)
    return lambda: found.sharing if (found := known()) else 1


def round_seconds(drafter: Drafter, plain: bool = True) -> Costs:
    """Seconds of a round by what it drafts and verifies, batch 1. Drafters without a model draft in no time."""
    if known := known_costs(drafter, plain):
        return known
    with drafter.target.turns:
        if plain:
            return known_costs(drafter) or set_costs(drafter, _round_seconds(drafter))
        # Others may be decoding with the drafter by now. What these rounds take more is soon learned.
        return known_costs(drafter, plain) or set_costs(drafter, round_seconds(drafter).anew(), plain)


def measure_drafting(drafter: Drafter) -> None:
    """Measure now what rounds take, where that needs the drafter for itself: later, others may decode with it. What
    cannot be measured is left to those who ask for it.
    """
    for one in (drafter, *drafter.parts):
        if isinstance(one, AutoregressiveDrafter):
            try:
                pass_cost(one)
            except Exception as error:
                log.warning("what drafting with %s takes could not be measured: %s", one.source, error)


def _round_seconds(drafter: Drafter) -> Costs:
    seconds = _measure_rounds(drafter) if isinstance(drafter, AutoregressiveDrafter) else {}
    if len(seconds) < 2:  # nor does one that drafts nothing, as where a tree's budget allows no node
        passes = costs_of(drafter.target)
        return type(passes)({int(width) - 1: passes(int(width)) for width in passes.widths})
    return LearnedCosts(seconds)


class ByTurns(Fixed):
    """Drafts each of the lengths in `DRAFTED` by turns, forwards and back, so that each comes after others: some leave
    work for the next round.
    """

    def __init__(self) -> None:
        super().__init__(k=max(DRAFTED))
        self._lengths = cycle([*DRAFTED, *DRAFTED[::-1]])
        self._wanted = next(self._lengths)

    def more(self, depth: int) -> bool:
        return depth < self._wanted

    def observe(self, drafted: int, accepted: int) -> None:
        self._wanted = next(self._lengths)


def _measure_rounds(drafter: AutoregressiveDrafter) -> dict[int, float]:
    """The least seconds of rounds by what they draft. They take turns, so that other work on the machine slows all."""
    new = ROUNDS * sum(1 + drafted for drafted in DRAFTED)
    prompt = [0] * max(1, min(NEAR, drafter.target.context - new))
    request = Request(prompt, limit=new, policy=ByTurns(), script=[0] * new)
    kept = drafter.calibration, drafter.copy
    drafter.calibration, drafter.copy = Calibration(), False  # this text teaches nothing, and repeats itself
    try:
        for _ in islice(Engine(drafter.target, drafter).run([request]), ROUNDS * len(DRAFTED)):
            pass
    finally:
        drafter.calibration, drafter.copy = kept
    least: dict[int, float] = {}
    for record in request.stats.rounds:
        seconds = record.seconds["draft"] + record.seconds["verify"]
        least[record.depth] = min(least.get(record.depth, seconds), seconds)
    return least
