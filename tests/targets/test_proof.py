"""A target gives what its model gives, or is refused: whatever the model does besides its layers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import paceline
from helpers import hf_greedy, one_thread  # noqa: F401
from paceline.errors import ContextOverflow, ModelError, UnsupportedModel
from paceline.targets import as_target, make_target, proof
from paceline.targets.reference import BlockTarget
from paceline.targets.torch_tier import TorchTarget
from paceline.targets.whole import WholeTarget
from tiny import small_llama
from told import told

PROMPTS = [[7, 11, 13, 7, 11], [5, 9, 17, 21, 5, 9, 17, 30, 5, 9, 17, 21, 5]]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def as_llama(kind: type[hf.LlamaForCausalLM]) -> hf.LlamaForCausalLM:
    """A random Llama that is of this class."""
    model = small_llama(eos_token_id=None)
    model.__class__ = kind
    return model


class Sharper(hf.LlamaForCausalLM):
    """Has a forward of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * torch.linspace(-1, 1, out.logits.shape[-1], dtype=out.logits.dtype)
        return out


def hooked() -> hf.LlamaForCausalLM:
    def shift(module: object, inputs: object, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state.roll(1, -1)
        return output

    model = small_llama(eos_token_id=None)
    model.model.register_forward_hook(shift)
    return model


CHANGED = {"a forward of its own": lambda: as_llama(Sharper), "a hook on the decoder": hooked}


@pytest.mark.parametrize("name", CHANGED)
def test_what_lies_between_the_layers_is_not_left_out(name: str) -> None:
    model = CHANGED[name]()
    want = [hf_greedy(model, prompt, 16) for prompt in PROMPTS]
    assert want != [hf_greedy(small_llama(eos_token_id=None), prompt, 16) for prompt in PROMPTS]
    llm = paceline.load(model, drafter="prompt-lookup")
    assert isinstance(llm.target, WholeTarget)
    assert [output.tokens for output in llm.generate(PROMPTS, max_new_tokens=16)] == want
    fast = paceline.custom_generate("prompt-lookup")
    got = model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=16, pad_token_id=0, custom_generate=fast)
    assert got[0, len(PROMPTS[0]) :].tolist() == want[0]


def test_custom_generate_sees_a_hook_that_came_later() -> None:
    model, fast = small_llama(eos_token_id=None), paceline.custom_generate("prompt-lookup")
    ids = torch.tensor(PROMPTS[:1])
    asked = {"max_new_tokens": 12, "pad_token_id": 0}
    model.generate(ids, **asked, custom_generate=fast)
    hook = model.model.register_forward_hook(lambda module, inputs, output: output)
    assert fast._llm.target.has_blocks
    model.model.register_forward_pre_hook(lambda module, inputs: None)
    model.generate(ids, **asked, custom_generate=fast)
    hook.remove()


class CountsAlone(hf.LlamaForCausalLM):
    """Takes positions from the length of its cache, as models do that are given none."""

    def forward(self, *args: Any, position_ids: object = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        ids = kwargs.get("input_ids", args[0] if args else None)
        own = torch.arange(ids.shape[1])[None] + past
        return super().forward(*args, position_ids=own, past_key_values=past_key_values, **kwargs)


class ReadsAhead(hf.LlamaForCausalLM):
    """Ignores the mask that it is given."""

    def forward(self, *args: Any, attention_mask: object = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Forgets(hf.LlamaForCausalLM):
    """Reads a text in two passes otherwise than in one."""

    def forward(self, *args: Any, past_key_values: object = None, **kwargs: Any) -> Any:
        out = super().forward(*args, past_key_values=past_key_values, **kwargs)
        out.logits = out.logits if past_key_values is None else out.logits.flip(-1)
        return out


@pytest.mark.parametrize("kind", [CountsAlone, ReadsAhead])
def test_models_that_do_not_do_as_they_are_told(kind: type[hf.LlamaForCausalLM]) -> None:
    """Through their whole forward; layer by layer they are Llamas, as they are by themselves."""
    model = as_llama(kind)
    with told(UnsupportedModel, r"llama models do not honour .* differ by .*%\): drafts cannot be verified|cannot run"):
        proof.prove(WholeTarget(model))
    assert as_target(model).has_blocks


def test_a_model_that_differs_from_itself() -> None:
    with told(
        UnsupportedModel, r"read a text in two passes otherwise than in one, in transformers \(logits differ by .*%\)"
    ):
        as_target(as_llama(Forgets))


def test_a_model_that_fails() -> None:
    class Broken(hf.LlamaForCausalLM):
        def forward(self, *args: object, **kwargs: object) -> Any:
            raise RuntimeError("no\nsuch luck")

    with told(UnsupportedModel, "do not run.*, in transformers: no"):
        as_target(as_llama(Broken))


def lost_layer(target: BlockTarget) -> None:
    target.num_layers -= 1


def no_final_norm(target: BlockTarget) -> None:
    target.features = lambda hidden: hidden  # type: ignore[method-assign]


@pytest.mark.parametrize("mistake", [lost_layer, no_final_norm])
def test_mistakes_of_a_target_are_seen(mistake: Callable[[BlockTarget], None]) -> None:
    for model in (small_llama(), small_llama(initializer_range=0.02), small_llama().bfloat16()):
        target = BlockTarget(model)
        proof.prove(target)
        mistake(target)
        with told(UnsupportedModel, "do not honour"):
            proof.prove(target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.02, 0.3])
def test_mpt_counts_slots_in_every_type(dtype: torch.dtype, scale: float) -> None:
    """Its linear biases count slots: rounding must not hide that."""
    config = hf.MptConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, initializer_range=scale)
    with told(UnsupportedModel, "mpt models do not honour"):
        proof.prove(WholeTarget(hf.MptForCausalLM(config).to(dtype).eval()))


class Coarse(hf.LlamaForCausalLM):
    """Rounds by the whole pass, as LLM.int8 and dynamic quantisation do."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        step = out.logits.abs().max() / 100
        out.logits = (out.logits / step).round() * step
        return out


def test_passes_that_differ_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        as_target(small_llama().float())
        assert not caplog.messages
        as_target(as_llama(Coarse))
    [line] = caplog.messages
    assert "greedy text may differ from generate's, even without drafts" in line
    assert "\n" not in line


@pytest.mark.parametrize("tier", ["torch"])
def test_a_fast_tier_that_differs_is_not_used(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = proof.witness

    def wrong(model: Any, **options: Any) -> proof.Witness:
        seen = right(model, **options)
        return proof.Witness(seen.ids, seen.logits.roll(1, -1))

    monkeypatch.setattr("paceline.targets.tiers.witness", wrong)
    with told(ModelError, "the torch tier gives other logits than llama itself .*: use the reference tier"):
        make_target(small_llama().float(), tier=tier, exact=False)


def test_a_fast_tier_that_fails_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model has no weights any more."""

    def broken(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("paceline.targets.torch_tier.TorchTarget.embed", broken)
    with told(
        ModelError, "the torch tier cannot run llama: llama models cannot run token trees: no; use the reference"
    ):
        make_target(small_llama().float(), tier="auto", exact=False)


def test_a_lack_of_memory_is_none_of_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    target = BlockTarget(small_llama())
    monkeypatch.setattr(target, "forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        proof.prove(target)
    monkeypatch.setattr(target.model, "forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        proof.witness(target.model)


def test_tokens_with_a_meaning_are_avoided() -> None:
    model = small_llama(eos_token_id=list(range(200)))
    model.config.image_token_id = 230
    ids = proof.witness(model, noise=False).ids
    assert ids.min() >= 200
    assert (ids != 230).all()
    assert ids.shape == (3, proof.LENGTH)
    model.config.eos_token_id = list(range(257))  # none is left
    assert proof.witness(model, noise=False).ids.shape == (3, proof.LENGTH)


# -- positions never come from a maximum over rows ---------------------------------------------------------------------
def test_llama_4_in_ragged_batches() -> None:
    """Its layers without rotation scale queries by positions that they count from the cache's one length."""
    config = hf.Llama4TextConfig(
        **SIZES,
        intermediate_size_mlp=48,
        num_local_experts=2,
        num_experts_per_tok=1,
        no_rope_layers=[0, 0],
        layer_types=["full_attention"] * 2,
        floor_scale=4,
        attn_scale=2.0,
        attn_temperature_tuning=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = hf.Llama4ForCausalLM(config).double().eval()
    want = [hf_greedy(model, prompt, 16) for prompt in PROMPTS]
    llm = paceline.load(model, drafter="prompt-lookup:branches=2+fixed:k=4")
    got = [output.tokens for output in llm.generate(PROMPTS, max_new_tokens=16, eos=())]
    assert got == want


def test_doge_ends_at_its_window() -> None:
    """Behind it a token sees the keys that it rates highest; of equal ones some, by their slots."""
    fields = SIZES | {"keep_window_size": 24}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = hf.DogeForCausalLM(hf.DogeConfig(**fields)).double().eval()
    llm = paceline.load(model, drafter="prompt-lookup:branches=2+fixed:k=4")
    got = [output.tokens for output in llm.generate(PROMPTS, max_new_tokens=11, eos=())]
    assert got == [hf_greedy(model, prompt, 11) for prompt in PROMPTS]
    with told(ContextOverflow, "context of 24 tokens"):
        llm.generate(PROMPTS[1], max_new_tokens=12)


def test_half_precision_is_not_refused_for_its_noise() -> None:
    for seed in range(3):
        assert as_target(small_llama(seed).bfloat16()).has_blocks
        assert as_target(small_llama(seed, initializer_range=0.02).half()).has_blocks


def largest(x: Tensor) -> float:
    return float(x.abs().max())


@torch.inference_mode()
def test_witness_is_what_the_model_says() -> None:
    model = small_llama()
    seen = proof.witness(model)
    assert largest(model(seen.ids).logits - seen.logits) == 0
    assert seen.ids[0, : proof.SHARED].tolist() == seen.ids[1, : proof.SHARED].tolist()
    assert proof.witness(model, 1).ids.tolist() != seen.ids.tolist()


@pytest.mark.parametrize("tier", ["reference", "torch", "auto"])
def test_logits_that_are_no_numbers(tier: str) -> None:
    model = small_llama().float()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = torch.nan
    with told(ModelError, "llama gives logits that are no numbers: its weights are damaged, or too large for float32"):
        make_target(model, tier=tier)


def scores_of_another_scale(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.25


def angles_of_another_size(model: Any) -> None:
    model.model.rotary_emb.inv_freq *= 1.2


def weaker_layers(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.mul_(0.8)


@pytest.mark.parametrize("mistake", [scores_of_another_scale, angles_of_another_size, weaker_layers])
@torch.inference_mode()
def test_half_precision_hides_no_mistake(mistake: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a deep model with large weights, whose passes in bfloat16 differ by as much as those of the default model."""
    monkeypatch.setattr("paceline.targets.described.check_plain", lambda _: None)  # so that mistakes can be made in it
    right, wrong = (small_llama(num_hidden_layers=16, initializer_range=0.2).bfloat16() for _ in range(2))
    seen = proof.witness(right, noise=False)
    mistake(wrong)
    target = TorchTarget(right)
    assert proof.differences(target, seen).max() > 0.02
    proof.check_agrees(target, seen)
    with told(ModelError, "the torch tier gives other logits than llama itself"):
        proof.check_agrees(TorchTarget(wrong), seen)
