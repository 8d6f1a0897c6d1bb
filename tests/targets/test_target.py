"""What is refused rather than decoded wrongly, and the little things around a target."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as hf

from helpers import one_thread  # noqa: F401
from paceline.decoding.engine import Engine
from paceline.decoding.request import Request
from paceline.drafters.layer_skip.drafter import LayerSkip
from paceline.drafters.none import NoDrafter
from paceline.errors import ContextOverflow, UnsupportedModel
from paceline.policies.fixed import Fixed
from paceline.targets.context import ENDLESS, context_of
from paceline.targets.reference import BlockTarget, as_target
from paceline.targets.span import Span
from paceline.targets.whole import WholeTarget
from tiny import byte_tokenizer, small_llama

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2}

REFUSED = {
    "encoder-decoder": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    ),
    "mamba": lambda: hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    ),
    "rwkv": lambda: hf.RwkvForCausalLM(hf.RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2)),
    "masked language model": lambda: hf.BertLMHeadModel(hf.BertConfig(**SMALL, intermediate_size=64)),
    "no head": lambda: hf.LlamaModel(hf.LlamaConfig(**WIDE)),
    "classifier": lambda: hf.LlamaForSequenceClassification(hf.LlamaConfig(**WIDE)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, dtype: torch.dtype) -> None:
    """With the usual initialisation too, whose tiny logits hide what a wrong position changes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = REFUSED[name]().to(dtype)
    with pytest.raises(UnsupportedModel) as error:
        as_target(model)
    assert "\n" not in str(error.value)


def test_flash_attention_is_refused() -> None:
    model = small_llama()
    for attention in ("flash_attention_2", "flex_attention"):
        model.config._attn_implementation = attention
        with pytest.raises(UnsupportedModel, match="sdpa"):
            as_target(model)


def gpt2(**config: object) -> hf.GPT2LMHeadModel:
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, **config))


def test_model_without_blocks_says_so() -> None:
    target = as_target(gpt2())
    assert isinstance(target, WholeTarget)
    assert not target.has_blocks
    span = Span(torch.zeros(1, 1, dtype=torch.long), target.new_cache(1, 1).lengths)
    for call in (lambda: target.embed(span), lambda: target.layers(), lambda: target.head(torch.zeros(1, 32))):
        with pytest.raises(UnsupportedModel, match="gpt2 models run through their whole forward only"):
            call()
    with pytest.raises(UnsupportedModel, match="layer-skip"):
        LayerSkip(target)


@torch.inference_mode()
def test_last_tap_is_before_the_final_norm_or_refused() -> None:
    """transformers reports the last hidden state behind the final norm: the whole forward cannot give the tap."""
    model = small_llama()
    last, span = model.config.num_hidden_layers, Span(torch.arange(6)[None], np.zeros(1, dtype=np.int64))
    target = BlockTarget(model)
    out = target.forward(span, target.new_cache(1, 6), [last])
    torch.testing.assert_close(target.head(out.taps[last]), out.logits, rtol=0, atol=0)
    whole = WholeTarget(model)
    with pytest.raises(UnsupportedModel, match="final norm"):
        whole.forward(span, whole.new_cache(1, 6), [last])


@torch.inference_mode()
def test_both_targets_agree() -> None:
    """A model that has blocks gives the same through its whole forward."""
    model = small_llama()
    ids = torch.arange(9)[None]
    logits = []
    for target in (WholeTarget(model), BlockTarget(model)):
        cache = target.new_cache(1, 9)
        target.prefill(ids[0, :5].tolist(), cache)
        logits.append(target.forward(Span(ids[:, 5:], cache.lengths.copy()), cache).logits)
    torch.testing.assert_close(*logits, rtol=0, atol=3e-6)


class TestContext:
    def test_overflow_is_found_before_anything_is_computed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        target = BlockTarget(small_llama(max_position_embeddings=16))
        engine = Engine(target, NoDrafter(target))
        fitting, long = (Request([1] * n, limit=8, policy=Fixed(k=0)) for n in (8, 9))
        monkeypatch.setattr(BlockTarget, "embed", lambda *_: pytest.fail("computed"))
        with pytest.raises(ContextOverflow, match=r"prompt of 9 tokens \+ 8 new tokens exceed .* of 16 tokens"):
            next(engine.run([fitting, long]))

    def test_longrope_ends_where_its_factors_change(self) -> None:
        """There a pass that reaches further gives all its tokens other positions: drafts would change the output."""
        factors = [1.0] * 4
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": [9.0] * 4}
        model = small_llama(
            max_position_embeddings=64, rope_parameters={**rope, "original_max_position_embeddings": 16}
        )
        whole, shorter = (model(torch.arange(n)[None]).logits[0, :10] for n in (20, 10))
        assert (whole - shorter).abs().max() > 0.1
        assert BlockTarget(model).context == 16

    @pytest.mark.parametrize(
        ("fields", "context"),
        [
            ({}, ENDLESS),
            ({"max_position_embeddings": 64}, 64),
            ({"n_positions": 32, "max_position_embeddings": None}, 32),
            ({"max_position_embeddings": 64, "keep_window_size": 16}, 16),
            ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 8}}, 8),
            ({"rope_parameters": {"rope_type": "longrope"}, "original_max_position_embeddings": 9}, 9),
            ({"rope_parameters": {"rope_type": "longrope"}, "max_position_embeddings": 64}, 64),
            (
                {
                    "rope_parameters": {
                        "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 8}
                    }
                },
                8,
            ),
            ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 8}}, ENDLESS),
        ],
    )
    def test_of_configurations(self, fields: dict[str, object], context: int) -> None:
        assert context_of(SimpleNamespace(**fields)) == context

    @pytest.mark.parametrize("make", [lambda: small_llama(max_position_embeddings=16), lambda: gpt2().double()])
    def test_filled_to_the_brim(self, make) -> None:
        """The last position of the context is used, also beside a row whose tree pads it beyond."""
        target = as_target(make())
        engine = Engine(target, Sevens(target))
        room = target.context
        requests = [Request([1] * n, limit=room - n, policy=Fixed(k=3)) for n in (room - 2, room - 6, 1)]
        for _ in engine.run(requests):
            pass
        assert [len(request.ids) for request in requests] == [room] * 3


class Sevens(NoDrafter):
    """Drafts a fork of sevens and eights as deep as it may."""

    def max_nodes(self, depth: int) -> int:
        return 2 * depth

    def draft(self, rows):
        trees = super().draft(rows)
        for row, tree in zip(rows, trees, strict=True):
            for token in (7, 8):
                tree.add_path([token] * min(row.room, row.policy.limit), "sevens")
        return trees


class TestFacts:
    def test_eos_of_the_generation_config_goes_before_the_config(self) -> None:
        model = small_llama(eos_token_id=5)
        model.generation_config.eos_token_id = None
        assert as_target(model).eos == (5,)
        model.generation_config.eos_token_id = [3, 4]
        assert as_target(model).eos == (3, 4)
        model.generation_config.eos_token_id = 6
        assert as_target(model).eos == (6,)
        model.generation_config.eos_token_id = model.config.eos_token_id = None
        assert as_target(model).eos == ()

    def test_a_model_is_put_into_eval_mode(self) -> None:
        model = small_llama(attention_dropout=0.5).train()
        target = as_target(model, byte_tokenizer())
        assert not model.training
        assert target.tokenizer is not None
        assert (target.num_layers, target.vocab_size, target.context) == (3, 257, 256)
        assert target.dtype == torch.float64
