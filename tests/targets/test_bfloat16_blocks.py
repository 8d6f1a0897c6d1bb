"""Products of bfloat16 with weights that stay in a GGUF file's blocks, in AMX's tiles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import paceline
from paceline.drafting.tree import tree_span
from paceline.targets import load_target
from paceline.targets.identity import is_same, probe_features
from paceline.targets.native import NativeTarget, available, build
from paceline.targets.native.model import NativeModel, Sizes
from paceline.targets.native.weights import Kind, Packed, Rows
from paceline.targets.span import Span
from targets.test_families import bushy
from targets.test_native import chunked, on_each_set, random_ids
from targets.test_native_formats import BLOCKS, floats_of
from tiny import small_llama
from tiny_gguf import random_blocks, write_gguf

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler with OpenMP")
WIDTHS = (*range(1, 36), 96, 97, 192)  # 96: the most tokens of a job
needs_tiles = pytest.mark.skipif("build.TILES not in build.runnable()", reason="no AMX")


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def target() -> NativeTarget:
    size = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    made = NativeTarget(small_llama(**size).float(), storage="rounded").in_bfloat16()
    assert made.compute_dtype == torch.bfloat16
    return made


def product(rows: Rows) -> NativeModel:
    packed = Packed(rows.kind, rows.inputs, [len(rows.data)])
    packed.write(rows.data, packed.places(0))
    model = NativeModel(Sizes(rows.inputs), [], None, packed)
    assert model.round_inputs(Kind.BF16)
    return model


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize(("outputs", "inputs"), [(150, 256), (75, 768), (5, 512)])
def test_products_are_those_of_rounded_inputs(kind: Kind, outputs: int, inputs: int) -> None:
    """With the weights as they are; the same bits at any width. The last panels are fewer than a tile's."""
    raw = random_blocks(kind.name, (outputs, inputs), np.random.default_rng(0), 3e-4)
    model, weights = product(Rows(kind, inputs, torch.from_numpy(raw))), floats_of(kind, raw)
    x = torch.randn(192, inputs, generator=torch.Generator().manual_seed(1))
    x[3] = 0
    want = x.bfloat16().double() @ weights.double().T

    def run() -> Tensor:
        results = [model.head(x[:width], normed=True) for width in WIDTHS]
        assert all(torch.equal(result, results[-1][: len(result)]) for result in results)
        assert float((results[-1] - want).norm() / want.norm()) < 1e-5
        assert not results[-1][3].any()
        return results[-1]

    on_each_set(run, own=[build.TILES])


@needs_tiles
def test_products_in_tiles_are_those_of_the_definition() -> None:
    """Block by block: of pairs of inputs four apart two chains of products with the digits, then the scale, then the
    sum of inputs times the minimum, each with one rounding.
    """
    outputs, inputs = 40, 96
    raw = random_blocks("Q4_1", (outputs, inputs), np.random.default_rng(0), 3e-4)
    blocks = raw.reshape(outputs, -1, 20)
    scale, least = (blocks[..., at : at + 2].copy().view(np.float16)[..., 0].astype(np.float32) for at in (0, 2))
    digits = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], -1).astype(np.float32)
    x = torch.randn(7, inputs, generator=torch.Generator().manual_seed(1))
    rounded = x.bfloat16().float().numpy().reshape(7, -1, 32)
    total = np.zeros((7, outputs), np.float32)
    for block in range(inputs // 32):
        chains = [np.zeros_like(total), np.zeros_like(total)]
        for k in range(32):
            chains[k // 4 % 2] += np.multiply.outer(rounded[:, block, k], digits[:, block, k])
        products, of_inputs = chains[0] + chains[1], _halves(rounded[:, block])
        total = _fma(least[:, block], of_inputs[:, None], total)
        total = _fma(scale[:, block], products, total)
    model = product(Rows(Kind.Q4_1, inputs, torch.from_numpy(raw)))
    before = build.instruction_set()
    build.choose(build.TILES)
    try:
        assert torch.equal(model.head(x, normed=True), torch.from_numpy(total))
    finally:
        build.choose(before)


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Of float32 in long doubles, whose 64 bits hold each product; a second rounding that matters is very rare."""
    return (a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)).astype(np.float32)


def _halves(x: np.ndarray) -> np.ndarray:
    """The sum of 32: each sixteen two by two, eight apart, then four, two and one; then both."""
    folded = x.reshape(len(x), 2, 16)
    while folded.shape[-1] > 1:
        half = folded.shape[-1] // 2
        folded = folded[..., :half] + folded[..., half:]
    return folded[:, 0, 0] + folded[:, 1, 0]


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

    on_each_set(run, own=[build.TILES])


@needs_tiles
def test_a_gguf_file_in_bfloat16_keeps_its_blocks(tmp_path: Path, cache_dir: Path) -> None:
    """Near the float32 model, known to heads as the same, and lossless by itself."""
    write_gguf(tmp_path / "tiny.gguf")
    name = str(tmp_path / "tiny.gguf")
    floats, small = load_target(name, tier="native"), load_target(name, dtype="bfloat16")
    assert isinstance(floats, NativeTarget)
    assert isinstance(small, NativeTarget)
    assert (small.exact, small.compute_dtype) == (True, torch.bfloat16)
    assert small.weight_bytes == floats.weight_bytes
    ids = random_ids(60)
    want, near = chunked(floats, ids, 60), chunked(small, ids, 60)
    assert 0 < float((near - want).norm() / want.norm()) < 0.02
    assert is_same(probe_features(small), probe_features(floats))
    llm = paceline.load(name, dtype="bfloat16", drafter="none")
    alone = llm.generate("once upon a time", max_new_tokens=24, eos=()).tokens
    drafted = llm.method("suffix", "fixed:k=6").generate("once upon a time", max_new_tokens=24, eos=()).tokens
    assert drafted == alone
