"""Policies that look at lengths alone: fixed, and the schedule of transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.candidate_generator import AssistedCandidateGenerator

import predictor_files
from paceline.errors import OptionError
from paceline.policies import POLICIES
from paceline.policies.base import Setting
from paceline.policies.fixed import Fixed
from paceline.policies.schedule import Schedule


def length(policy) -> int:
    """How far the policy drafts when nothing else stops it."""
    depth = 0
    while policy.more(depth):
        assert policy.keep(None, depth)
        depth += 1
    return depth


@pytest.mark.parametrize("k", [0, 1, 5])
def test_fixed(k: int) -> None:
    policy = Fixed(k=k)
    for outcome in ((k, 0), (k, k)):
        assert length(policy) == policy.limit == k
        policy.observe(*outcome)


@given(st.integers(1, 9), st.lists(st.floats(0, 1), max_size=40))
def test_schedule_is_that_of_transformers(k: int, shares: list[float]) -> None:
    theirs = SimpleNamespace(
        num_assistant_tokens=k,
        assistant_generation_config=SimpleNamespace(
            num_assistant_tokens_schedule="heuristic", assistant_confidence_threshold=0
        ),
    )
    ours = Schedule(k=k, max=1000)
    for share in shares:
        drafted = length(ours)
        assert drafted == theirs.num_assistant_tokens
        accepted = round(share * drafted)
        ours.observe(drafted, accepted)
        scores = torch.zeros(1, drafted + 1, 2)
        AssistedCandidateGenerator.update_candidate_strategy(theirs, torch.zeros(1, 1), scores, accepted)


def test_schedule_stays_within_its_bounds() -> None:
    policy = Schedule(k=5, max=8)
    for _ in range(5):
        policy.observe(length(policy), length(policy))
    assert length(policy) == policy.limit == 8
    for _ in range(20):
        policy.observe(length(policy), 0)
    assert length(policy) == 1


def test_schedule_learns_nothing_from_an_empty_draft() -> None:
    policy = Schedule(k=5)
    policy.observe(0, 0)
    assert length(policy) == 5


@pytest.mark.parametrize("text", ["fixed:k=-1", "schedule:k=0", "schedule:k=9:max=8", "schedule:max=0"])
def test_out_of_range(text: str) -> None:
    with pytest.raises(OptionError, match=text.partition(":")[0]):
        POLICIES.parse(text).build()


@pytest.mark.parametrize("name", list(POLICIES))
def test_no_policy_drafts_beyond_its_limit(name: str, tmp_path: Path) -> None:
    """`limit` sizes the KV cache: it must hold whatever happens."""
    policy = POLICIES.parse(name).build()
    predictor_files.write(tmp_path)
    policy.check(Setting("tests", "tests", 32, 32, (tmp_path,)))
    sharp = torch.tensor([1.0, 0.0])
    for _ in range(60):
        depth = 0
        while policy.more(depth) and policy.keep(sharp, depth, torch.ones(32)):
            depth += 1
        assert depth <= policy.limit
        policy.observe(depth, depth)
