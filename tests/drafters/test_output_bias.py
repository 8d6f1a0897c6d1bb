"""Heads that draft some tokens only do so with the bias of the model's output layer (Phi), as they are trained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from helpers import one_thread  # noqa: F401
from paceline.decoding.engine import Engine
from paceline.decoding.request import Request
from paceline.drafters.dflash.forward import DFlashForward
from paceline.drafters.dflash.head import DFlashHead
from paceline.drafters.eagle.drafter import Eagle
from paceline.drafters.eagle.eagle3_forward import Eagle3Forward
from paceline.drafters.eagle.eagle3_head import Eagle3Head
from paceline.drafters.eagle.forward import EagleForward
from paceline.drafters.eagle.head import EagleHead
from paceline.drafters.medusa.forward import MedusaForward
from paceline.drafters.medusa.head import OF_TARGET, MedusaHead
from paceline.drafting.text_vocabulary import TextVocabulary
from paceline.policies.fixed import Fixed
from paceline.targets import Target, make_target
from paceline.targets.native import available
from tiny_families import tiny

TIERS = ("reference", "native") if available() else ("reference",)
TOKENS = [3, 5, 60, 90, 91, 92]


def biased(**config: Any) -> PreTrainedModel:
    model = tiny("phi", **config).float().eval()
    model.get_output_embeddings().bias.data.normal_(std=4.0, generator=torch.Generator().manual_seed(0))
    return model


def eagle(model: PreTrainedModel, target: Target, states: Tensor) -> tuple[Tensor, Tensor]:
    head = EagleHead.from_target(model, tokens=TOKENS)
    return head.outputs(states), EagleForward(head, target).head(states)


def eagle3(model: PreTrainedModel, target: Target, states: Tensor) -> tuple[Tensor, Tensor]:
    head = Eagle3Head.from_target(model, tokens=TOKENS, taps=(0, 1, 2))
    return head.outputs(states), Eagle3Forward(head, target).head(states)


def medusa(model: PreTrainedModel, target: Target, states: Tensor) -> tuple[Tensor, Tensor]:
    head = MedusaHead.from_target(model, heads=2, vocabulary=OF_TARGET, tokens=TOKENS)
    return head(target.features(states[0])), MedusaForward(head, target)(states[0]).logits


def dflash(model: PreTrainedModel, target: Target, states: Tensor) -> tuple[Tensor, Tensor]:
    head = DFlashHead.from_target(model, 1, block=4, tokens=TOKENS, taps=(1, 2), mask=9, inner=20)
    return head.outputs(states[0]), DFlashForward(head, target, 4).output(states[0])


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("kind", [eagle, eagle3, medusa, dflash])
@torch.no_grad()
def test_heads_draft_with_the_bias(kind: Any, tier: str) -> None:
    model = biased()
    states = torch.randn(1, 7, model.config.hidden_size, generator=torch.manual_seed(1))
    want, got = kind(model, make_target(biased(), None, tier), states)
    assert float((got - want).norm() / want.norm()) < 0.02
    bias = model.get_output_embeddings().bias[TOKENS]
    likeness = torch.corrcoef(torch.stack([want.flatten(0, -2).mean(0), bias]))[0, 1]
    assert likeness > 0.5


@pytest.mark.parametrize("tier", TIERS)
def test_a_head_that_knows_nothing_drafts_what_the_bias_says(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, head = make_target(biased(), None, tier), EagleHead.from_target(biased(), tokens=TOKENS)
    with torch.no_grad():
        for weight in head.fc.parameters():
            weight.zero_()
    seen: list[int] = []
    drafter = Eagle(target, head=head)
    draft = drafter.draft

    def seen_drafts(rows: Any) -> Any:
        trees = draft(rows)
        seen.extend(token for tree in trees for token in tree.tokens[1:])
        return trees

    monkeypatch.setattr(drafter, "draft", seen_drafts)
    for _ in Engine(target, drafter).run([Request([5, 6, 7], limit=8, policy=Fixed(k=3))]):
        pass
    assert set(seen) == {TOKENS[int(biased().get_output_embeddings().bias[TOKENS].argmax())]}


def test_tokens_of_the_text_have_theirs() -> None:
    target = make_target(biased(tie_word_embeddings=True), None, "reference")
    own, words = torch.tensor(TOKENS), TextVocabulary(target, torch.tensor(TOKENS), 4)
    assert words.extra == 4
    words.start(1)
    words.begin(0)
    words.read([SimpleNamespace(slot=0, ids=[7, 8, 9])])  # type: ignore[list-item]
    features = torch.randn(1, 3, target.config.hidden_size)
    with torch.no_grad():
        every = target.logits(features)
        got = words.logits(features, every[..., own])
    torch.testing.assert_close(got, every[..., words.of(0)], rtol=1e-4, atol=1e-4)
