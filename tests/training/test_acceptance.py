"""Simulated acceptance against a simulation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.training.data.samples import UNKNOWN
from paceline.training.heads.simulated_acceptance import CHAIN, chain_counts, draft_counts, figures, tally


@given(st.lists(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=9, max_size=9), min_size=1, max_size=3))
def test_chains_are_counted_as_drafts_would_go(rows: list[list[tuple[bool, bool]]]) -> None:
    right = torch.tensor([[r for r, _ in row] for row in rows])
    asked = torch.tensor([[a for _, a in row] for row in rows])
    hits, starts = chain_counts(right, asked).tolist()
    for n in range(1, CHAIN + 1):
        chains = [row[at : at + n] for row in rows for at in range(len(row) - n + 1)]
        drafts = [chain for chain in chains if all(a for _, a in chain)]
        assert starts[n - 1] == len(drafts)
        assert hits[n - 1] == sum(all(r for r, _ in draft) for draft in drafts)


@given(st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=3))
def test_drafts_made_step_by_step_are_counted_alike(rows: list[list[bool]]) -> None:
    """A draft whose n-th step is as good as a first step n tokens on."""
    right = torch.tensor(rows)
    asked = torch.ones_like(right)
    asked[:, 0] = False
    unfolded = [torch.nn.functional.pad(x, (0, CHAIN - 1)).unfold(1, CHAIN, 1) for x in (right.int(), asked.int())]
    assert draft_counts(*(x.bool() for x in unfolded)).tolist() == chain_counts(right, asked).tolist()


def test_figures() -> None:
    asked = torch.tensor([[1, 1], [1, 1], [1, 0]]).bool()
    right = torch.tensor([[1, 1], [0, 1], [1, 1]]).bool()
    best, top = torch.tensor([4, 5, 6]), torch.tensor([[4, 1], [1, 5], [UNKNOWN, UNKNOWN]])
    counts = 2 * tally(draft_counts(right, asked), best, top, torch.tensor(6.0))
    found = figures(counts, 2)
    want = {"accepted_1": 2 / 3, "accepted_2": 1 / 2, "argmax": 1 / 2, "held_back_loss": 2.0}
    assert found == pytest.approx(want)
