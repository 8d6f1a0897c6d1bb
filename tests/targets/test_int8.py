"""Products whose inputs are rounded to 8 bits, on the native tier: the same bits at any width, on every set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import paceline
from paceline.drafting.tree import tree_span
from paceline.errors import OptionError
from paceline.targets import load_target
from paceline.targets.identity import is_same, probe_features
from paceline.targets.native import NativeTarget, available
from paceline.targets.native.model import NativeModel, Sizes
from paceline.targets.native.weights import Kind, Packed, Rows
from paceline.targets.span import Span
from targets.test_families import bushy
from targets.test_native import chunked, on_each_set, random_ids
from targets.test_native_formats import BLOCKS, floats_of
from tiny import small_llama
from tiny_gguf import random_blocks, write_gguf

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler with OpenMP")
WIDTHS = (*range(1, 20), 33, 97, 120)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def target() -> NativeTarget:
    size = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    return NativeTarget(small_llama(**size).float(), storage="rounded").in_int8()


def product(rows: Rows) -> NativeModel:
    packed = Packed(rows.kind, rows.inputs, [len(rows.data)])
    packed.write(rows.data, packed.places(0))
    model = NativeModel(Sizes(rows.inputs), [], None, packed)
    assert model.round_inputs()
    return model


def rounded(x: Tensor) -> Tensor:
    """Blocks of 32 as multiples of 1/127 of their largest number, as llama.cpp rounds them."""
    blocks = x.unflatten(1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (blocks / scale).round() * scale, torch.zeros(())).flatten(1)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("inputs", [256, 768])
def test_products_are_those_of_rounded_inputs(kind: Kind, inputs: int) -> None:
    """150 outputs: the last panels are fewer than a tile's."""
    raw = random_blocks(kind.name, (150, inputs), np.random.default_rng(0), 3e-4)
    model, weights = product(Rows(kind, inputs, torch.from_numpy(raw))), floats_of(kind, raw)
    x = torch.randn(120, inputs, generator=torch.Generator().manual_seed(1))
    x[3], x[4, :40] = 0, 0
    want = rounded(x).double() @ weights.double().T

    def run() -> Tensor:
        results = [model.head(x[:width], normed=True) for width in WIDTHS]
        assert all(torch.equal(result, results[-1][: len(result)]) for result in results)
        return results[-1]

    on_each_set(run)
    assert float((run() - want).norm() / want.norm()) < 1e-5
    assert not run()[3].any()


@given(seed=st.integers(0, 1 << 30), size=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]))
@settings(max_examples=20, deadline=None)
def test_the_largest_sums_fit(seed: int, size: float) -> None:
    """Numbers at both ends of their range, where sums of 16 bits would run over."""
    draw = np.random.default_rng(seed)
    weights = draw.choice(np.array([-127.0, 127.0], np.float32), (16, 64))
    x = torch.from_numpy(draw.choice(np.array([-size, size], np.float32), (5, 64)))
    [row] = [Rows(Kind.Q8_0, 64, torch.from_numpy(_q8(weights)))]
    model = product(row)
    on_each_set(lambda: model.head(x, normed=True))
    want = x.double() @ torch.from_numpy(weights).double().T
    assert torch.allclose(model.head(x, normed=True).double(), want, rtol=1e-5, atol=size * 1e-2)


def _q8(weights: np.ndarray) -> np.ndarray:
    """Whole numbers as blocks of Q8_0 with a scale of 1."""
    rows, inputs = weights.shape
    made = np.zeros((rows, inputs // 32, 34), np.uint8)
    made[..., :2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    made[..., 2:] = weights.astype(np.int8).view(np.uint8).reshape(rows, -1, 32)
    return made.reshape(rows, -1)


def test_any_width_gives_the_same_bits(target: NativeTarget) -> None:
    ids = random_ids(140)
    want = chunked(target, ids, 1)
    assert torch.equal(chunked(target, ids, 140), want)
    cache = target.new_cache(1, 140)
    target.prefill(ids[:90].tolist(), cache)
    for width in range(1, 41):
        logits = target.forward(Span(ids[None, 90 : 90 + width], cache.lengths.copy()), cache).logits[0]
        assert torch.equal(logits, want[90 : 90 + width]), f"width {width}"


def test_a_path_through_a_tree_is_a_chain_on_each_set(target: NativeTarget) -> None:
    tree, context = bushy(), random_ids(61)

    def run() -> Tensor:
        cache = target.new_cache(1, 77)
        target.prefill(context.tolist(), cache)
        logits = target.forward(tree_span([tree], cache.lengths, target.device), cache).logits[0]
        node = len(tree) - 1
        path = torch.tensor([tree.tokens[n] for n in tree.path(node)])
        assert torch.equal(logits[node], chunked(target, torch.cat([context, path]), 1)[-1])
        return logits

    on_each_set(run)


def test_a_gguf_file_in_int8(tmp_path: Path, cache_dir: Path) -> None:
    """Near the float32 model, known to heads as the same, and lossless by itself."""
    write_gguf(tmp_path / "tiny.gguf")
    name = str(tmp_path / "tiny.gguf")
    floats, small = load_target(name, tier="native"), load_target(name, dtype="int8")
    assert isinstance(small, NativeTarget)
    assert (small.tier, small.exact, small.compute_dtype, small.model_dtype) == (
        "native",
        True,
        torch.int8,
        torch.float32,
    )
    ids = random_ids(40)
    want, got = chunked(floats, ids, 40), chunked(small, ids, 40)
    assert 1e-5 < float((got - want).norm() / want.norm()) < 0.1
    assert is_same(probe_features(small), probe_features(floats))
    llm = paceline.load(name, dtype="int8", drafter="suffix")
    plain = paceline.load(name, dtype=torch.int8, drafter="none")
    prompt = ids[:9].tolist()
    assert llm.generate(prompt, max_new_tokens=20).tokens == plain.generate(prompt, max_new_tokens=20).tokens


def test_where_int8_cannot_be(tmp_path: Path, cache_dir: Path) -> None:
    small_llama().float().save_pretrained(tmp_path / "floats")
    write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(OptionError, match="native tier, not by torch"):
        load_target(str(tmp_path / "tiny.gguf"), dtype="int8", tier="torch")
    with pytest.raises(OptionError, match="weights in blocks"):
        NativeTarget(small_llama().float()).in_int8()


def test_a_chain_with_floats_is_left_as_it_is() -> None:
    blocks, floats = Packed(Kind.Q8_0, 32, [16]), Packed(Kind.F32, 32, [16])
    blocks.then(floats)
    assert not blocks.round_inputs()
    assert blocks.c.input_kind == floats.c.input_kind == Kind.F32
