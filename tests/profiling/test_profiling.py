"""Profiles: what a pass needs, what the machine can do, and what is made of both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from helpers import one_thread  # noqa: F401
from paceline.drafters.none import NoDrafter
from paceline.drafting.base import Drafter, Row
from paceline.drafting.tree import TokenTree
from paceline.errors import ContextOverflow, OptionError
from paceline.profiling import PassCost, Profile, Roofline, measure, measure_roofline, pass_cost, roofline, time_passes
from paceline.profiling.timing import compare_passes
from paceline.targets import Target, make_target
from paceline.targets.costs import stored_passes
from tiny import small_llama

WIDTHS = (1, 4, 8)


class Echo(Drafter):
    """The last token again, as often as the policy likes."""

    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        trees = [TokenTree.root(row.ids[-1]) for row in rows]
        for row, tree in zip(rows, trees, strict=True):
            while tree.depth < row.room and row.policy.more(tree.depth):
                tree.add(row.ids[-1], tree.depth, "echo")
        return trees


@pytest.fixture(scope="module")
def targets() -> list[Target]:
    return [make_target(small_llama().float(), tier=tier) for tier in ("torch", "reference")]


@pytest.fixture
def roof(monkeypatch: pytest.MonkeyPatch) -> Roofline:
    """A machine that reads 1 MB and computes 100 MFLOP a second."""
    made = Roofline(1e6, 1e8)
    monkeypatch.setattr("paceline.profiling.profile.measure_roofline", lambda device, dtype: made)
    return made


def test_cost_of_a_pass(targets: list[Target]) -> None:
    cost = pass_cost(targets[1], 3, 10)
    heads, size, layers = 4, 8, 3
    assert cost.weight_bytes == 4 * targets[1].weight_count
    assert cost.cache_bytes == layers * 2 * 2 * size * 13 * 4  # two key/value heads, 13 tokens
    assert cost.flops == 3 * 2 * targets[1].weight_count + layers * heads * 4 * size * (11 + 12 + 13)
    assert cost.bytes == cost.weight_bytes + cost.cache_bytes


def test_the_floor_is_the_later_of_reading_and_computing() -> None:
    cost = PassCost(900, 100, 4000)
    assert Roofline(bandwidth=100, flops=1000).floor(cost) == 10
    assert Roofline(bandwidth=1000, flops=1000).floor(cost) == 4


def test_roofline_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plausible: between a very old computer and one there is not yet."""
    monkeypatch.setattr(roofline, "BUFFER", 32 << 20)
    monkeypatch.setattr(roofline, "SIDE", {"cpu": 256})
    found = measure_roofline(torch.device("cpu"), torch.float32, seconds=0.05)
    assert 1e7 < found.bandwidth < 1e13
    assert 1e7 < found.flops < 1e15


def test_profiles_side_by_side(targets: list[Target], roof: Roofline, cache_dir: Path) -> None:
    drafters = {"echo": Echo, "none": NoDrafter}
    found = measure(targets, "some/model", context=20, repeats=2, drafters=drafters, widths=WIDTHS)
    assert [one.tier for one in found] == ["torch", "reference"]
    for one, target in zip(found, targets, strict=True):
        assert list(one.passes) == list(WIDTHS)
        for width, measured in one.passes.items():
            cost = pass_cost(target, width, 20)
            assert 0 < measured.low <= measured.median <= measured.high
            assert (measured.repeats, measured.flops, measured.floor) == (2, cost.flops, roof.floor(cost))
        drafted = one.drafts["echo"]
        assert drafted is not None
        assert drafted.median > 0
        assert one.drafts["none"] is None
        assert (one.exact, one.exactness) == (target.exact, target.exactness)
    stored = {one.save() for one in found}
    assert stored == set((cache_dir / "profiles").iterdir())
    assert len(stored) == 2
    for one, target in zip(found, targets, strict=True):
        assert json.loads(one.path.read_text()) == json.loads(json.dumps(one.as_dict()))
        measured = {one.context: {width: timing.median for width, timing in one.passes.items()}}
        assert stored_passes(target) == measured | one.contexts
        assert list(one.contexts) == [64]  # of the others the model has no room for


def test_noise_between_widths(targets: list[Target]) -> None:
    exact, reference = compare_passes(targets, WIDTHS, 20, 1)
    assert targets[0].exact is (exact.noise == 0)
    assert reference.noise < 1e-3


def test_one_target(targets: list[Target]) -> None:
    timings = time_passes(targets[0], (1, 2), 5, repeats=1)
    assert [timing.repeats for timing in timings.values()] == [1, 1]


def test_refused(targets: list[Target]) -> None:
    with pytest.raises(ContextOverflow):
        measure(targets, "m", context=250)
    for words, options in (("context", {"context": 0}), ("repeats", {"repeats": 0})):
        with pytest.raises(OptionError, match=words):
            measure(targets, "m", **options)


def test_files_by_what_costs_depend_on(targets: list[Target], roof: Roofline, cache_dir: Path) -> None:
    [one] = measure(targets[1:], "hub/../model", context=4, repeats=1, widths=(1, 2))
    assert one.path.parent == cache_dir / "profiles"
    assert stored_passes(targets[1]) is None  # it was not saved
    one.save()
    assert stored_passes(targets[1]) is not None
    one.path.write_text("{}")
    assert stored_passes(targets[1]) is None
    others = [{"device": "cuda:1"}, {"dtype": "bfloat16"}, {"exact": True}, {"tier": "torch"}, {"threads": 99}]
    paths = {Profile(**vars(one) | change).path for change in others}
    assert len(paths | {one.path}) == 6
