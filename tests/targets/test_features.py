"""The final norm and the output matrix apart, and models that go without some norms, as draft heads do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from helpers import one_thread, small_neox  # noqa: F401
from paceline.targets import TIERS, make_target
from paceline.targets.families import FAMILIES
from paceline.targets.span import Span
from tiny import small_llama

MODELS = {"llama": small_llama, "gpt_neox": small_neox}
RUNS = [(name, tier) for name in MODELS for tier in TIERS if (name, tier) != ("gpt_neox", "native")]


def without_norms(model: PreTrainedModel) -> PreTrainedModel:
    """Without the first layer's norm before attention and without the final norm."""
    family = FAMILIES[model.config.model_type]
    decoder = getattr(model, family.decoder)
    decoder.layers[0].input_layernorm = nn.Identity()
    setattr(decoder, family.norm, nn.Identity())
    return model


@pytest.mark.parametrize(("name", "tier"), RUNS)
@torch.inference_mode()
def test_norm_and_matrix(name: str, tier: str) -> None:
    target = make_target(MODELS[name]().float(), tier=tier)
    hidden = 3 * torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    features = target.features(hidden)
    torch.testing.assert_close(features, MODELS[name]().float().base_model.get_submodule(norm(name))(hidden))
    torch.testing.assert_close(target.logits(features), target.head(hidden), rtol=1e-5, atol=1e-5)
    assert target.logits(features[0, 0]).shape == (257,)


@pytest.mark.parametrize(("name", "tier"), RUNS)
@torch.inference_mode()
def test_without_norms(name: str, tier: str) -> None:
    """As Hugging Face's forward, in one pass and in pieces; other models have their norms."""
    ids = torch.tensor([[5, 6, 7, 8, 9, 100, 3, 200]])
    want = without_norms(MODELS[name]().float())(ids).logits
    target = make_target(without_norms(MODELS[name]().float()), tier=tier)
    span = Span(ids, np.zeros(1, dtype=np.int64))
    torch.testing.assert_close(target.forward(span, target.new_cache(1, 8)).logits, want, rtol=1e-4, atol=1e-4)
    cache = target.new_cache(1, 8)
    for part in (span.part(0, 3), span.part(3, 8)):
        got = target.forward(part, cache, (0, target.num_layers))
    torch.testing.assert_close(got.logits, want[:, 3:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.taps[0], target.embed(span.part(3, 8)))  # a tap nobody has written over


def norm(name: str) -> str:
    return FAMILIES[MODELS[name]().config.model_type].norm
