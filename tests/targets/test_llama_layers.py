"""Layers of heads, against transformers' modules of the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from helpers import one_thread  # noqa: F401
from paceline.drafting.own_layers import layers_config, make_layers
from paceline.errors import ModifiedModel
from paceline.targets import make_target
from paceline.targets.llama_layers import LlamaLayers, LlamaShape

TOKENS = 12
PADDED = torch.tensor([[1] * TOKENS, [1] * 7 + [0] * 5])
CHAIN = torch.zeros(2, 1, TOKENS, TOKENS).masked_fill_(~torch.ones(TOKENS, TOKENS).bool().tril(), -1e30)
TWO_TEXTS = torch.tensor([[*range(5), *range(7)]])


@pytest.fixture
def both() -> tuple[LlamaLayers, LlamaForCausalLM]:
    config = LlamaConfig(
        vocab_size=9,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    theirs = LlamaForCausalLM(config).eval()
    ours: Any = make_layers(layers_config(config, 2), 9)
    assert isinstance(ours, LlamaLayers)
    state = {name: weight for name, weight in theirs.state_dict().items() if name != "model.embed_tokens.weight"}
    ours.load_state_dict(state)  # the same names
    return ours, theirs


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"attention_mask": PADDED},
        {"attention_mask": PADDED[:1]},
        {"attention_mask": CHAIN},
        {"position_ids": torch.arange(5, 5 + TOKENS)[None]},
        {"position_ids": TWO_TEXTS},
        {"position_ids": TWO_TEXTS.expand(2, -1), "attention_mask": PADDED},
    ],
)
def test_same_bits_and_gradients(both: tuple[LlamaLayers, LlamaForCausalLM], arguments: dict[str, Tensor]) -> None:
    ours, theirs = both
    for dtype in (torch.bfloat16, torch.float32):
        for model in both:
            for weight in model.parameters():
                weight.data = weight.data.to(dtype)
        entered = torch.randn(1 if arguments.get("attention_mask") is PADDED[:1] else 2, TOKENS, 32).to(dtype)
        cast = {key: value.to(dtype) if value.is_floating_point() else value for key, value in arguments.items()}
        seen, want = (model.model(inputs_embeds=entered, use_cache=False, **cast) for model in both)
        assert torch.equal(seen.last_hidden_state, want.last_hidden_state)
    logits = [model(inputs_embeds=entered, use_cache=False, **cast).logits for model in both]
    assert torch.equal(*logits)
    for made in logits:
        made.square().sum().backward()
    gradients = dict(theirs.named_parameters())
    for name, weight in ours.named_parameters():
        assert torch.equal(weight.grad, gradients[name].grad), name


def test_same_bits_with_a_cache(both: tuple[LlamaLayers, LlamaForCausalLM]) -> None:
    entered, caches = torch.randn(2, TOKENS, 32), (DynamicCache(), DynamicCache())
    for _ in range(2):
        seen, want = (
            model.model(
                inputs_embeds=entered,
                attention_mask=CHAIN.expand(2, 1, -1, -1).repeat(1, 1, 1, 1 + (cache.get_seq_length() > 0)),
                position_ids=torch.arange(TOKENS)[None],
                past_key_values=cache,
                use_cache=True,
            )
            for model, cache in zip(both, caches, strict=True)
        )
        assert torch.equal(seen.last_hidden_state, want.last_hidden_state)


def test_shapes() -> None:
    """Defaults are those of transformers, which leaves them out of what is stored."""
    shape = LlamaShape.of(layers_config(LlamaConfig(), 32))
    assert shape is not None
    config = LlamaConfig(vocab_size=1)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    for name in (*names, "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "vocab_size"):
        assert getattr(shape, name) == getattr(config, name), name
    assert shape.per_layer_config == [shape] * 32


@pytest.mark.parametrize(
    "asked",
    [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    ],
)
def test_what_else_is_asked_for_is_transformers(asked: dict[str, Any]) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "max_position_embeddings": 64}
    config = layers_config(LlamaConfig(**sizes, **asked), 1)
    assert LlamaShape.of(config) is None
    assert LlamaShape.of({key: value for key, value in config.items() if key != "rope_parameters"}) is None
    assert type(make_layers(config, 0)).__name__ == "LlamaForCausalLM"


def test_changed_layers_are_refused(both: tuple[LlamaLayers, LlamaForCausalLM]) -> None:
    model: Any = both[0]
    model.set_input_embeddings(torch.nn.Embedding(1, 32))
    model.model.layers[1] = torch.nn.Identity()
    with pytest.raises(ModifiedModel, match="layers of another kind"):
        make_target(model, tier="torch", proven=True)
