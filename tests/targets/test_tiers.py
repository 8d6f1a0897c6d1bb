"""Which tier a model gets."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
import transformers as hf

import paceline
from paceline.errors import NativeUnavailable, OptionError, UnsupportedModel
from paceline.targets import load_target, make_target, sources
from paceline.targets.linear import can_pack
from paceline.targets.native import available, build
from paceline.targets.native import target as native
from paceline.targets.span import Span
from tiny import byte_tokenizer, small_llama
from told import told

FAST = ["torch", *(["native"] if available() else [])]


def gpt2() -> hf.PreTrainedModel:
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=64, n_positions=64)).eval()


def named(monkeypatch: pytest.MonkeyPatch, model: hf.PreTrainedModel) -> None:
    monkeypatch.setattr(sources, "load_model", lambda name, **options: (model, None))


@pytest.mark.skipif(not available(), reason="no C++ compiler with OpenMP")
def test_a_model_loads_on_the_fastest_tier_that_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for make, tier in ((lambda: small_llama().float(), "native"), (small_llama, "torch"), (gpt2, "reference")):
        for options in ({}, {"tier": "auto"}):
            named(monkeypatch, make())
            assert load_target("any", **options).tier == tier
    named(monkeypatch, small_llama().bfloat16())
    assert load_target("any").tier == "native"
    named(monkeypatch, small_llama().half())  # asked for: the native tier would compute in float32
    assert load_target("any").tier == "torch"
    named(monkeypatch, small_llama().float())
    assert load_target("any", exact=False).tier == "torch"  # the native tier has nothing to give up


@pytest.mark.skipif(not available(), reason="no C++ compiler with OpenMP")
def test_the_fastest_tier_where_there_are_no_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, small_llama().float())
    monkeypatch.setattr("paceline.targets.native.instruction_set", lambda: "portable")
    assert load_target("any").tier == "torch"
    named(monkeypatch, small_llama().float())
    assert load_target("any", tier="native").tier == "native"


def test_objects_stay_what_they_are() -> None:
    model = small_llama().float()
    assert paceline.load(model, tokenizer=byte_tokenizer(), tier="auto").target.tier == "reference"
    assert model(torch.tensor([[1]])).logits.isfinite().all()


def no_library() -> None:
    raise NativeUnavailable("no compiler")


def test_without_a_compiler_the_torch_tier_takes_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    named(monkeypatch, small_llama().float())
    monkeypatch.setattr(build, "library", no_library)
    monkeypatch.setattr(native, "library", no_library)
    with caplog.at_level(logging.WARNING, "paceline"):
        assert load_target("any").tier == "torch"
    assert caplog.messages == ["no compiler; going on with the torch tier"]


class Adapted(torch.nn.Linear):
    """Stands for the modules of quantisers and adapters, which derive from `Linear`."""


def hooked(model: hf.PreTrainedModel) -> None:
    model.model.layers[1].register_forward_hook(lambda *_: None)


def replaced(model: hf.PreTrainedModel) -> None:
    model.model.layers[0].mlp.forward = lambda hidden: hidden


def adapted(model: hf.PreTrainedModel) -> None:
    model.model.layers[2].self_attn.o_proj = Adapted(32, 32, bias=False)


def eight_bits(model: hf.PreTrainedModel) -> None:
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)


def parametrised(model: hf.PreTrainedModel) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.down_proj)


def fewer_layers(model: hf.PreTrainedModel) -> None:
    del model.model.layers[1:]


def one_layer_twice(model: hf.PreTrainedModel) -> None:
    model.model.layers[2] = model.model.layers[0]


def another_activation(model: hf.PreTrainedModel) -> None:
    model.model.layers[1].mlp.act_fn = torch.nn.GELU()


def another_scale(model: hf.PreTrainedModel) -> None:
    model.model.layers[1].self_attn.scaling = 0.5


def another_epsilon(model: hf.PreTrainedModel) -> None:
    model.model.layers[2].input_layernorm.variance_epsilon = 1e-2


def another_norm(model: hf.PreTrainedModel) -> None:
    model.model.norm = torch.nn.LayerNorm(32)


def no_mlp(model: hf.PreTrainedModel) -> None:
    model.model.layers[0].mlp = torch.nn.Identity()


CHANGES = {
    fewer_layers: r"a decoder that was changed \(1 layers",
    one_layer_twice: r"a decoder that was changed \(3 layers .* or some twice",
    another_activation: r"a decoder that was changed \(layers.1: mlp.act_fn",
    another_scale: r"a decoder that was changed \(layers.1: self_attn",
    another_epsilon: r"a decoder that was changed \(layers.2: input_layernorm",
    another_norm: r"a decoder that was changed \(norm: itself",
    no_mlp: r"a decoder that was changed \(layers.0: mlp",
    hooked: r"hooks, or a forward that was replaced \(model.layers.1\)",
    replaced: r"hooks, or a forward that was replaced \(model.layers.0.mlp\)",
    adapted: r"adapters, or a Adapted of another library \(model.layers.2.self_attn.o_proj\)",
    eight_bits: "quantised weights",
    parametrised: "adapters, or a ParametrizedLinear|parametrised weights",
}


BROKEN = (one_layer_twice, eight_bits)  # with a cache, or at all: no tier runs what transformers does not


@pytest.mark.parametrize("change", list(CHANGES), ids=lambda change: change.__name__)
def test_models_that_are_more_than_their_weights(
    change: Callable[[hf.PreTrainedModel], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The fast tiers would leave out what is not in the weights: they refuse, before they take any."""
    model = small_llama().float()
    change(model)
    for tier in FAST:
        with told(UnsupportedModel, rf"the fast tiers do not support ({CHANGES[change]}).*: use the reference tier"):
            make_target(model, tier=tier)
    assert not any(weight.is_meta or not weight.numel() for weight in model.parameters())
    named(monkeypatch, model)
    with caplog.at_level(logging.WARNING, "paceline"):
        if change in BROKEN:
            with told(UnsupportedModel):
                load_target("any")
        else:
            assert load_target("any").tier == "reference"
    assert len(caplog.messages) == 1
    assert re.search(CHANGES[change], caplog.messages[0])


def test_a_tier_asked_for_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, gpt2())
    with pytest.raises(UnsupportedModel):
        load_target("any", tier="torch")


def test_native_falls_back_to_torch_where_it_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise NativeUnavailable("no compiler")

    monkeypatch.setattr(native, "library", refuse)
    with caplog.at_level(logging.WARNING, "paceline"):
        assert make_target(small_llama().float(), tier="native").tier == "torch"
    assert caplog.messages == ["no compiler; going on with the torch tier"]


def test_an_unknown_tier_is_refused() -> None:
    with pytest.raises(OptionError, match="unknown tier 'fast'"):
        make_target(small_llama(), tier="fast")


# -- exactness, as asked for -------------------------------------------------------------------------------------------
CAN = "on a CPU the native tier is in float32 and bfloat16, the torch tier in float32"


@pytest.mark.skipif(not can_pack(), reason="no oneDNN: nothing is promised")
@pytest.mark.parametrize("tier", FAST)
def test_exactness_can_be_insisted_on(tier: str) -> None:
    assert make_target(small_llama().float(), tier=tier, exact=True).exact


@pytest.mark.parametrize(("tier", "why"), [("reference", "torch's operations"), ("torch", "float64 on cpu")])
def test_exactness_where_it_cannot_be(tier: str, why: str) -> None:
    with told(OptionError, rf"the {tier} tier cannot be exact here \(.*{why}.*\): {CAN}"):
        make_target(small_llama(), tier=tier, exact=True)  # float64


def test_a_tier_that_is_never_exact_is_refused_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "load_model", lambda *_, **__: pytest.fail("loaded"))
    with told(OptionError, CAN):
        load_target("any", tier="reference", exact=True)


def test_a_model_that_no_exact_tier_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, gpt2())
    with told(UnsupportedModel, "does not support models of type gpt2: use the reference tier, which is not exact"):
        load_target("any", exact=True)


@torch.inference_mode()
def test_exactness_given_up() -> None:
    """The torch tier then runs torch's own attention, and gives the same but for rounding."""
    targets = [make_target(small_llama().float(), tier="torch", exact=exact) for exact in (None, False)]
    assert not targets[1].exact
    assert targets[1].exactness == "torch's own attention was asked for"
    assert type(targets[0].ops) is not type(targets[1].ops) or not can_pack()
    ids = torch.arange(40).view(2, 20)
    logits = [t.forward(Span(ids, np.zeros(2, np.int64)), t.new_cache(2, 20)).logits for t in targets]
    torch.testing.assert_close(*logits, rtol=0, atol=4e-4)


@pytest.mark.skipif(not available(), reason="no C++ compiler with OpenMP")
def test_the_native_tier_stays_exact() -> None:
    assert make_target(small_llama().float(), tier="native", exact=False).exact


# -- what a pass reads -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tier", ["reference", *FAST])
def test_weights_of_a_pass(tier: str, tied: bool) -> None:
    """All matrices and the head, once; not the embedding's rows that nobody looks up."""
    target = make_target(small_llama(tie_word_embeddings=tied).float(), tier=tier)
    layer = 32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 64
    assert target.weight_count == 3 * layer + 257 * 32
    padding = 3 * 15 * 32 * 4 if tier == "native" else 0  # rows to whole panels of sixteen
    assert 0 <= target.weight_bytes - 4 * target.weight_count <= padding
