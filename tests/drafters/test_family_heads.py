"""Drafters that need a model's layers, for every family: the output is plain decoding's, and heads run as trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import paceline
from drafters.test_eagle_head import noisy as eagle_head
from helpers import hf_greedy, one_thread, perturbed  # noqa: F401
from paceline.drafters.eagle.forward import EagleForward
from paceline.drafters.eagle.head import EagleHead
from paceline.drafters.early_exit.head import ExitHead
from paceline.drafters.medusa.forward import MedusaForward
from paceline.drafters.medusa.head import OF_TARGET, MedusaHead
from paceline.drafting.output_rows import output_rows
from paceline.drafting.own_layers import fast_layers
from paceline.errors import UnsupportedModel
from paceline.targets import make_target
from paceline.targets.families import FAMILIES, Adjustment, embedding_matrix, output_matrix
from paceline.targets.native import available
from paceline.targets.reference import as_target
from paceline.targets.span import Span
from paceline.training.heads.eagle import EagleOptions, EagleTask
from paceline.training.heads.frozen_layers import FrozenLayers
from tiny import byte_tokenizer
from tiny_families import VARIANTS, tiny
from told import told

#: With layers of one kind, as heads have them and released models do.
UNIFORM = {"qwen2_moe": {"mlp_only_layers": []}, "qwen3_moe": {"decoder_sparse_step": 1}}
TIERS = ("reference", "native") if available() else ("reference",)
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [100]]
NEW = 8


@pytest.mark.parametrize("variant", VARIANTS)
def test_output_is_plain_decodings(
    variant: str, tmp_path: Path, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny(variant, **UNIFORM.get(variant, {}))
    truth = [hf_greedy(model, prompt, NEW) for prompt in PROMPTS]
    perturbed(ExitHead.from_target(model, 1, exit_layers=1, tokens=range(120)), noise=0.05).save(tmp_path / "exit")
    perturbed(MedusaHead.from_target(model, heads=2, tokens=range(120)), noise=0.05).save(tmp_path / "medusa")
    eagle_head(model, tokens=range(120)).save(tmp_path / "eagle")
    heads = [f"{kind}:head={tmp_path / folder}" for kind, folder in (("early-exit", "exit"), ("medusa", "medusa"))]
    plain = paceline.load(model, drafter="none", tokenizer=byte_tokenizer(), tier=TIERS[-1])
    for drafter in ("none", "layer-skip", *heads, f"eagle:head={tmp_path / 'eagle'}"):
        outputs = plain.method(drafter, "fixed:k=3").generate(PROMPTS, batch=2, max_new_tokens=NEW, eos=())
        assert [output.tokens for output in outputs] == truth, drafter
        assert drafter == "none" or sum(output.stats.drafted for output in outputs), drafter
    assert not [record for record in caplog.records if record.name == "paceline"]  # heads run on their target's tier


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tier", TIERS)
@torch.inference_mode()
def test_heads_run_as_trained(variant: str, tier: str) -> None:
    """An exit head of the first layer's, an output matrix and embeddings, on the tier and in training."""
    target, model = (tiny(variant, **UNIFORM.get(variant, {})) for _ in range(2))
    target = make_target(target, None, tier)
    with torch.inference_mode(False):
        head = ExitHead.from_target(model, 1, exit_layers=2)
    ids = torch.arange(40, 52)[None]
    span = Span(ids, np.zeros(1, dtype=np.int64))
    entered = target.embed(span)
    torch.testing.assert_close(entered[0], embedding_matrix(model)[ids[0]], rtol=1e-6, atol=0)
    want = head(entered)
    layers = fast_layers(head.lm, target)
    got = layers.head(layers.layers(entered, span, layers.new_cache(1, 12), 0, 2))
    assert float((got - want).norm() / want.norm()) < 0.02  # the native tier rounds heads whose rows are whole blocks
    torch.testing.assert_close(output_rows(target, ids[0]), output_matrix(model)[ids[0]], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("variant", ["phi", "gemma2", "gemma3", "granite"])
@torch.no_grad()
def test_heads_are_trained_as_they_draft(variant: str) -> None:
    """The model's bias and cap are in what its own output layer tells, and in what training takes for the truth."""
    model = tiny(variant).float().eval()
    if (bias := model.get_output_embeddings().bias) is not None:
        bias.normal_(generator=torch.Generator().manual_seed(0))
    target, states = as_target(model), torch.randn(1, 7, model.config.hidden_size, generator=torch.manual_seed(1))
    eagle, medusa = EagleHead.from_target(model), MedusaHead.from_target(model, heads=2, vocabulary=OF_TARGET)
    torch.testing.assert_close(eagle.outputs(states), EagleForward(eagle, target).head(states), rtol=1e-4, atol=1e-4)
    drafted = MedusaForward(medusa, target)
    seen = target.features(states[0])
    torch.testing.assert_close(medusa(seen), drafted(states[0]).logits, rtol=1e-4, atol=1e-4)
    for tokens in (None, [3, 5, 90]):
        head = EagleHead.from_target(model, tokens=tokens)
        matrix = output_matrix(model) if tokens is None else output_matrix(model)[tokens]
        task = EagleTask(head, FrozenLayers(target), EagleOptions(), matrix, seed=0)
        task.adjusted = Adjustment.of(model)
        every = target.logits(seen)
        torch.testing.assert_close(
            task.truth(seen), every if tokens is None else every[:, tokens], rtol=1e-4, atol=1e-4
        )


def test_layers_of_another_kind() -> None:
    with told(UnsupportedModel, "layers of another kind"):
        ExitHead.from_target(tiny("qwen3_moe"), 1, exit_layers=1, copied=1)


def test_a_head_starts_with_the_targets_logits() -> None:
    """Its first layers, norm and output matrix being the target's, it is the target, factors and all; caps are not."""
    for variant in ("granite", "cohere", "gemma", "llama"):
        model = tiny(variant)
        target = as_target(model)
        head = ExitHead.from_target(model, 1, exit_layers=2, copied=1)
        ids = torch.arange(20, 32)[None]
        cache, span = target.new_cache(1, 12), Span(ids, np.zeros(1, dtype=np.int64))
        with torch.inference_mode():
            logits = head(target.layers(target.embed(span), span, cache, 0, 1))
            torch.testing.assert_close(logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert FAMILIES["gemma2"].of_layers() == {"final_logit_softcapping": None}
