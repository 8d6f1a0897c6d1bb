"""What `paceline tune` learned on a user's own prompts: a small JSON file for each model and its settings."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from paceline.drafters.merge import Merge
from paceline.drafting.budget import Calibration
from paceline.drafting.gate import Gate
from paceline.files import read_json, whole
from paceline.targets import store
from paceline.targets.cost_model import LearnedCosts
from paceline.targets.costs import fault, known_costs, read_passes, set_costs, settings_path
from paceline.targets.machine import this_machine

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.drafting.base import Drafter
    from paceline.targets.target import Target

FORMAT = 1

log = logging.getLogger("paceline")


@dataclass
class Tuned:
    """What drafters and budgets start from.

    Attributes:
        machine: where it was measured: it is true nowhere else.
        prompts, measured: how many, and when.
        speedup: of `auto` over plain decoding on them.
        profile: costs of passes, as a stored profile has them.
        calibration: how often candidates were right, see `drafting.budget.Calibration`.
        gates: by source what asking it brought, see `drafting.gate.Gate`.
    """

    machine: str
    prompts: int
    measured: str
    speedup: float
    profile: dict[str, Any]
    calibration: list[list[Any]]
    gates: dict[str, list[list[float]]]
    format: int = FORMAT

    def save(self, target: Target) -> Path:
        """Write it, whole or not at all. Raises ModelError when the cache cannot be written."""
        path = settings_path("tuned", target)
        with store.disk_errors(path.parent), whole(path) as partial:
            partial.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        return path

    def check(self) -> None:
        """Raises ValueError, KeyError, TypeError or AttributeError for values that nothing could have learned."""
        read_passes(self.profile)
        Calibration().restore(self.calibration)
        for kept in self.gates.values():
            Gate().restore(kept)
        if not 0 < self.speedup < float("inf"):
            raise ValueError("a speedup is above 0")

    def apply(self, target: Target, drafter: Drafter) -> None:
        """Have them start from it; costs that this process has learned meanwhile stay."""
        if known_costs(target) is None:
            set_costs(target, LearnedCosts.fitted(read_passes(self.profile)))
        drafter.calibration.restore(self.calibration)
        if isinstance(drafter, Merge):
            for at, gate in drafter.known.items():
                if kept := self.gates.get(drafter.parts[at].source):
                    gate.restore(kept)


def kept_gates(drafter: Drafter) -> dict[str, list[list[float]]]:
    """What a merge's gates have seen, by source."""
    known = drafter.known if isinstance(drafter, Merge) else {}
    return {drafter.parts[at].source: gate.kept() for at, gate in known.items()}


def tuned_for(target: Target) -> Tuned | None:
    """What was learned for this target; None when nothing was, or with a warning where its file is damaged or of
    another machine.
    """
    path = settings_path("tuned", target)
    try:
        values = read_json(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise ValueError(f"it has format {values['format']}, this version needs {FORMAT}")
        if values["machine"] != this_machine():
            raise ValueError(f"it was measured on another machine, {values['machine']}")
        found = Tuned(**values)
        found.check()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("What paceline tune stored in %s is not used (%s): run it again.", path, fault(error))
        return None
    return found
