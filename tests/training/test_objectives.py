"""Losses against their definitions."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from paceline.training import objectives
from paceline.training.data.dataset import IGNORE
from paceline.training.data.samples import UNKNOWN
from paceline.training.objectives import soft_cross_entropy, soft_labels, whole_cross_entropy

LABELS = torch.tensor([3, 1, 2])
TOP = torch.tensor([[3, 0], [4, 1], [UNKNOWN, UNKNOWN]])
LOGP = torch.tensor([[-0.1, -3.0], [-0.5, -1.0], [-torch.inf, -torch.inf]])


def test_text_is_cross_entropy() -> None:
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    tokens, weights = soft_labels("text", LABELS, TOP, LOGP)
    want = functional.cross_entropy(logits, LABELS, reduction="sum")
    torch.testing.assert_close(soft_cross_entropy(logits, tokens, weights), want)


def test_argmax_is_cross_entropy_with_the_target_s_choice() -> None:
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    tokens, weights = soft_labels("argmax", LABELS, TOP, LOGP)
    want = functional.cross_entropy(logits, torch.tensor([3, 4, 2]), reduction="sum")
    torch.testing.assert_close(soft_cross_entropy(logits, tokens, weights), want)


def test_distil_is_least_where_the_draft_is_the_target() -> None:
    """Its gradient vanishes there, and where the target was not asked the text is learnt."""
    tokens, weights = soft_labels("distil", LABELS, TOP, LOGP)
    torch.testing.assert_close(weights.sum(1), torch.ones(3))
    p = torch.zeros(3, 5).scatter_add(1, tokens.clamp(min=0), weights)
    torch.testing.assert_close(p[0, 3] / p[0, 0], torch.exp(torch.tensor(2.9)))
    assert p[2].tolist() == [0, 0, 1, 0, 0]
    logits = (p[:2] + 1e-9).log().requires_grad_()
    soft_cross_entropy(logits, tokens[:2], weights[:2]).backward()
    assert logits.grad.abs().max() < 1e-5


def test_whole_is_least_where_the_draft_is_the_target() -> None:
    """Where it is the entropy, and its gradient vanishes; positions count as they weigh."""
    target = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    logits, weights = (target + 2).requires_grad_(), torch.tensor([1.0, 0.5, 0.0])
    loss = whole_cross_entropy(logits, target, weights)
    loss.backward()
    torch.testing.assert_close(loss, (weights * torch.distributions.Categorical(logits=target).entropy()).sum())
    assert logits.grad.abs().max() < 1e-6
    assert whole_cross_entropy(target.flip(1), target, weights) > loss


def test_whole_is_cross_entropy_however_many_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient, too; several drafts may be of one token."""
    monkeypatch.setattr(objectives, "AT_A_TIME", 12)
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 5, generator=draw, requires_grad=True)
    said, weights, rows = torch.randn(4, 5, generator=draw), torch.rand(7, generator=draw), torch.arange(7) % 4
    loss = 3 * whole_cross_entropy(logits, said, weights, rows)
    (found,) = torch.autograd.grad(loss, logits)
    each = functional.cross_entropy(logits, said[rows].softmax(1), reduction="none")
    want = 3 * (weights * each).sum()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(found, torch.autograd.grad(want, logits)[0])


def test_labels_outside_the_vocabulary_do_not_count() -> None:
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    outputs, weights = torch.tensor([[1, IGNORE], [IGNORE, IGNORE]]), torch.tensor([[0.7, 0.3], [0.5, 0.5]])
    want = -0.7 * logits.log_softmax(-1)[0, 1]
    torch.testing.assert_close(soft_cross_entropy(logits, outputs, weights), want)


def test_without_the_target_s_choices_the_text_is_learnt() -> None:
    nothing = torch.empty(3, 0)
    for objective in ("text", "argmax", "distil"):
        tokens, weights = soft_labels(objective, LABELS, nothing.long(), nothing)
        assert tokens.tolist() == LABELS[:, None].tolist()
        assert weights.tolist() == [[1], [1], [1]]
