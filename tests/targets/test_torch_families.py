"""The families of the table on the torch tier: transformers' logits, exactly at any width; or one line says why not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from paceline.errors import UnsupportedModel
from paceline.targets.linear import can_pack
from paceline.targets.reference import as_target
from paceline.targets.span import Span
from paceline.targets.target import Target
from paceline.targets.torch_tier import make_inexact_torch_target, make_torch_target
from tiny_families import NOT_ON_TORCH, VARIANTS, VOCAB, tiny
from told import told

IDS = torch.randint(0, VOCAB, (1, 30), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("make", [make_torch_target, make_inexact_torch_target])
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant not in NOT_ON_TORCH])
@torch.inference_mode()
def test_is_hugging_face(variant: str, make: Callable[[PreTrainedModel], Target]) -> None:
    want = tiny(variant)(IDS).logits
    target = make(tiny(variant))
    cache = target.new_cache(1, 30)
    logits = target.forward(Span(IDS, cache.lengths.copy()), cache).logits
    torch.testing.assert_close(logits, want, rtol=0, atol=2e-5 * float(want.abs().max()))
    assert target.exact == (make is make_torch_target and can_pack())
    if target.exact:
        cache.lengths[:] = 20
        again = [target.forward(Span(IDS[:, 20 : 20 + width], cache.lengths.copy()), cache) for width in (1, 2, 5, 10)]
        assert all(torch.equal(out.logits, logits[:, 20 : 20 + out.logits.shape[1]]) for out in again)


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant not in NOT_ON_TORCH])
@torch.inference_mode()
def test_skipped_sublayers(variant: str) -> None:
    skip, results = {(0, "attention"), (1, "mlp"), (2, "attention"), (2, "mlp")}, []
    for target in (make_torch_target(tiny(variant)), as_target(tiny(variant))):
        cache = target.new_cache(1, 30)
        span = Span(IDS, cache.lengths.copy())
        results.append(target.layers(target.embed(span), span, cache, 0, 3, skip))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4 * float(results[1].abs().max()))


@pytest.mark.parametrize(("variant", "words"), NOT_ON_TORCH.items())
def test_refused(variant: str, words: str) -> None:
    with told(UnsupportedModel, words):
        make_torch_target(tiny(variant))


@torch.inference_mode()
def test_in_bfloat16() -> None:
    """Norms whose weights count from 1, factors and post-norms, as near to float32 as transformers' bfloat16 is."""
    for variant in ("granite", "glm4", "cohere", "olmo", "stablelm"):
        want, theirs = tiny(variant)(IDS).logits, tiny(variant).bfloat16()(IDS).logits.float()
        target = make_torch_target(tiny(variant).bfloat16())
        cache = target.new_cache(1, 30)
        ours = target.forward(Span(IDS, cache.lengths.copy()), cache).logits.float()
        assert float((ours - want).abs().mean()) < 1.5 * float((theirs - want).abs().mean())


def test_a_token_reads_the_experts_it_chooses() -> None:
    target = make_torch_target(tiny("mixtral"))  # two of five, in three layers
    attention, expert = 60 * (60 + 40) + 60 * 60, 60 * 2 * 100 + 100 * 60
    assert target.weight_count == 3 * (attention + 5 * 60 + 2 * expert) + VOCAB * 60
    assert target.weight_bytes == 4 * target.weight_count
