"""What the rounds of a run say of passes that begin late, and of the time that choosing takes."""

from __future__ import annotations

import pytest

from paceline.api import LLM
from paceline.bench.tracing import TimedPass, _choosing, _profile, _share
from paceline.drafters.none import NoDrafter
from paceline.policies import POLICIES
from paceline.profiling.trace import Source
from paceline.targets import as_target
from paceline.targets.cost_model import Costs
from paceline.targets.costs import set_costs
from tiny import small_llama


def test_the_share_of_a_pass_that_is_left() -> None:
    whole = [TimedPass(width, 10, 1.0 + width, 0.0, 0.0) for width in (1, 2, 3) for _ in range(12)]
    late = (
        [TimedPass(2, 20, 1.5, 0.0, 0.0)] * 12
        + [TimedPass(1, 20, 9.0, 0.0, 0.0)] * 12
        + [TimedPass(3, 20, 0.1, 0.0, 0.0)]
    )
    assert _share(late, whole) == pytest.approx(0.5)  # of width 2: one of width 1 is whole, a single one says little
    assert _share([], whole) == 1.0
    drafted = [TimedPass(2, 20, 1.5, 0.5, 0.0)] + [TimedPass(1, 20, 0.5, 0.4, 0.0)] * 12
    plain = [TimedPass(1, 20, 2.0, 0.1, 0.0)] * 30
    assert _share([*drafted, *plain], whole) == pytest.approx(0.25)  # of drafts that were given up


def test_what_choosing_takes() -> None:
    head = Source("head", "whole", 4, "pace", [1.0, 0.5], 0.25)
    look_up = Source("look-up", "free", 4, "fixed", [0.125], 0.0)
    refused = [TimedPass(1, 10, 5.0, 1.5, 1.0)] * 30  # drafted, and not kept, after it had caught up
    never = [TimedPass(1, 10, 5.0, 0.125, 1.0)] * 12
    assert _choosing([*refused, *never], [head], 0.25) == pytest.approx(0.125 + 0.5)
    assert _choosing(refused, [head], 0.25) == pytest.approx(0.5)
    assert _choosing([TimedPass(1, 10, 5.0, 0.375, 0.0)] * 12, [look_up, head], 0.25) == pytest.approx(0.25)


def test_a_run_of_few_passes_has_a_profile_all_the_same() -> None:
    target = as_target(small_llama())
    set_costs(target, Costs({1: 0.25, 4: 0.5}))
    found = _profile([TimedPass(1, 10, 1.0, 0.0, 0.0)] * 5, LLM(target, NoDrafter(target), POLICIES.parse("fixed")))
    assert found["passes"][1] == {"median": 0.25}
