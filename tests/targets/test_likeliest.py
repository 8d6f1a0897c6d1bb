"""The likeliest tokens without all logits: those of all logits, whatever rounding does on the way."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline import DRAFTERS, LLM, POLICIES
from paceline.drafting.tree import tree_span
from paceline.targets.native import NativeTarget, available
from paceline.targets.native.model import NativeModel, Sizes
from paceline.targets.native.rough import Rough
from paceline.targets.native.weights import FLOATS, Kind, Packed, Rows
from paceline.targets.span import Span
from paceline.targets.target import PassOutput
from targets.test_families import bushy
from targets.test_native import on_each_set, random_ids
from tiny import small_llama
from tiny_families import tiny
from tiny_gguf import random_blocks

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler with OpenMP")


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def target() -> NativeTarget:
    size = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    return NativeTarget(small_llama(**size).float(), storage="rounded")


def sizes(inputs: int, **others: float) -> Sizes:
    """Of a model without layers; a pass over it wants heads all the same."""
    return Sizes(inputs, heads=1, kv_heads=1, head_dim=8, **others)  # type: ignore[arg-type]


def matrix(kind: Kind, outputs: int, inputs: int, seed: int = 0, bias: Tensor | None = None) -> NativeModel:
    draw = np.random.default_rng(seed)
    if kind in FLOATS:
        raw = Rows.of(torch.from_numpy(draw.normal(size=(outputs, inputs))).to(FLOATS[kind])).data
    else:
        raw = torch.from_numpy(random_blocks(kind.name, (outputs, inputs), draw, 3e-4))
    packed = Packed(kind, inputs, [outputs])
    packed.write(raw, packed.places(0))
    if bias is not None:
        packed.set_bias([bias])
    return NativeModel(sizes(inputs), [], None, packed, Rough.of(packed))


def likeliest(model: NativeModel, x: Tensor) -> Tensor:
    """Of rows that enter the output matrix as they are."""
    assert model.rough
    found = torch.full((len(x), 1), -1)
    span, nothing = Span(torch.zeros(1, len(x), dtype=torch.long), np.zeros(1)), np.zeros(1)
    cache: Any = SimpleNamespace(addresses=nothing)
    model.run(x.clone(), span, [], cache, 0, 0, context=len(x), likeliest=found)
    return found[:, 0]


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("inputs", [256, 768])
def test_they_are_those_of_all_logits(kind: Kind, inputs: int) -> None:
    """150 outputs: the last panel has fewer than others. Rows nearly alike leave little between the largest two."""
    model = matrix(kind, 150, inputs)
    x = torch.randn(120, inputs, generator=torch.Generator().manual_seed(1))
    x[3], x[4, :40], x[5:60] = 0, 0, x[4] + 1e-6 * x[5:60]

    def run() -> Tensor:
        want = model.head(x, normed=True).argmax(-1)
        for width in (*range(1, 20), 33, 97, 120):
            assert torch.equal(likeliest(model, x[:width]), want[:width])
        return want

    on_each_set(run)


@given(
    kind=st.sampled_from(Kind),
    seed=st.integers(0, 1 << 30),
    size=st.sampled_from([1e-42, 1e-30, 1e-3, 1.0, 1e15, 1e30]),
    outlier=st.sampled_from([1.0, 1e3, 1e6]),
    biased=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_numbers_of_any_size(kind: Kind, seed: int, size: float, outlier: float, biased: bool) -> None:
    """An input far above the others leaves nothing of these in 8 bits."""
    drawn = torch.Generator().manual_seed(seed)
    model = matrix(kind, 300, 256, seed, torch.randn(300, generator=drawn) * size if biased else None)
    x = torch.randn(7, 256, generator=drawn) * size
    x[:, torch.randint(256, (3,), generator=drawn)] *= outlier
    on_each_set(lambda: likeliest(model, x))
    assert torch.equal(likeliest(model, x), model.head(x, normed=True).argmax(-1))


def test_a_bias_far_above_all_products() -> None:
    """Sums then differ by roundings alone, and those of the rough products are others."""
    model = matrix(Kind.F32, 300, 256, bias=torch.full((300,), 1000.0))
    x = 2e-6 * torch.randn(2000, 256, generator=torch.Generator().manual_seed(0))
    assert torch.equal(likeliest(model, x), torch.from_numpy(model.head(x, normed=True).numpy().argmax(-1)))


def test_of_equal_ones_it_is_the_first() -> None:
    raw = random_blocks("Q8_0", (20, 64), np.random.default_rng(0), 3e-4)
    packed = Packed(Kind.Q8_0, 64, [400])
    packed.write(torch.from_numpy(np.tile(raw, (20, 1))), packed.places(0))
    model = NativeModel(sizes(64), [], None, packed, Rough.of(packed))
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(2))
    found = likeliest(model, x)
    assert int(found.max()) < 20
    assert torch.equal(found, model.head(x, normed=True)[:, :20].argmax(-1))
    assert likeliest(model, torch.zeros(1, 64)).tolist() == [0]


@pytest.mark.parametrize("what", [float("nan"), float("inf")])
def test_numbers_that_are_none(what: float) -> None:
    """Any token will do, but it is one; and others in the pass keep theirs."""
    model, x = matrix(Kind.Q8_0, 300, 64), torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    want = model.head(x, normed=True).argmax(-1)
    x[1, 5] = what
    found = likeliest(model, x)
    assert found[[0, 2]].tolist() == want[[0, 2]].tolist()
    assert 0 <= int(found[1]) < 300


def test_where_all_logits_are_needed() -> None:
    """A cap may make different logits equal, and rows of rounded inputs are read in bytes already."""
    assert not NativeTarget(tiny("gemma2", hidden_size=96)).native.rough
    model = matrix(Kind.Q8_0, 40, 64)
    assert model.rough
    model.round_inputs()
    assert not model.rough
    assert not Rough.of(Packed(Kind.F32, 60, [40])), "no whole blocks"


def test_what_a_greedy_pass_reads() -> None:
    """Of an output matrix in floats the copy in blocks; of one in blocks, itself."""
    floats = NativeTarget(small_llama(hidden_size=64).float(), storage="fp32")
    head, rough = floats.native.matrices[-1], floats.native.rough
    assert rough
    assert floats.greedy_weight_bytes == floats.weight_bytes - head.bytes + rough.matrix.bytes < floats.weight_bytes
    blocks = NativeTarget(small_llama(hidden_size=64).float(), storage="rounded")
    assert blocks.greedy_weight_bytes == blocks.weight_bytes


@pytest.fixture(scope="module")
def granite() -> NativeTarget:
    return NativeTarget(tiny("granite", hidden_size=96))


@pytest.mark.parametrize("name", ["target", "granite"])
def test_a_greedy_pass(name: str, request: pytest.FixtureRequest) -> None:
    """Over chains and trees, and batches: the same tokens, hidden states and cache, and the logits of whoever asks.
    Granite's logits are multiplied by a factor.
    """
    target: NativeTarget = request.getfixturevalue(name)
    assert target.native.rough
    ids = random_ids(2, 60)
    for width in (1, 2, 5, 17):
        span = Span(ids[:, :width], np.zeros(2, np.int64))
        caches = [target.new_cache(2, 80) for _ in range(2)]
        whole = target.forward(span, caches[0], taps=(1, target.num_layers))
        greedy = target.forward_greedy(span, caches[1], taps=(1, target.num_layers))
        assert torch.equal(told(greedy), told(whole))
        assert torch.equal(greedy.row(1, width).logits, whole.logits[1])
        assert torch.equal(greedy.logits, whole.logits)
        assert all(torch.equal(greedy.taps[tap], whole.taps[tap]) for tap in whole.taps)
        assert all(map(torch.equal, *(cache.tensors for cache in caches)))
    cache = target.new_cache(1, 80)
    span = tree_span([bushy()], cache.lengths, target.device)
    assert torch.equal(told(target.forward_greedy(span, cache)), target.forward(span, cache).logits.argmax(-1))


def told(out: PassOutput) -> Tensor:
    assert out.likeliest is not None
    return out.likeliest


@pytest.mark.parametrize(
    ("method", "options", "all_logits"),
    [
        ("none", {}, False),
        ("prompt-lookup", {}, False),
        ("recycling", {}, True),
        ("lookahead", {}, True),
        ("merge:drafters=prompt-lookup|recycling", {}, True),
        ("none", {"temperature": 0.7, "seed": 1}, True),
        ("none", {"repetition_penalty": 1.2}, True),
        ("none", {"logprobs": 2}, True),
    ],
)
def test_rounds_compute_logits_where_somebody_reads_them(
    target: NativeTarget, monkeypatch: pytest.MonkeyPatch, method: str, options: dict[str, Any], all_logits: bool
) -> None:
    """And never after the pass."""
    llm, passes = LLM(target, DRAFTERS.parse(method).build(target), POLICIES.parse("fixed")), {True: 0, False: 0}
    run = target.native.run

    def counted(*arguments: Any, **more: Any) -> None:
        if more.get("likeliest") is not None:
            passes[more["logits"] is not None] += 1
        run(*arguments, **more)

    monkeypatch.setattr(target.native, "run", counted)
    monkeypatch.setattr(target, "head", None)
    output = llm.generate([5, 6, 7, 5, 6], max_new_tokens=12, **options)
    assert len(output.tokens) == 12
    assert passes[all_logits] >= 3
    assert not passes[not all_logits]
