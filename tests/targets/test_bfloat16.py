"""Models in bfloat16 on the native tier: products of rounded inputs, the same bits at any width."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.drafting.tree import tree_span
from paceline.targets import make_target
from paceline.targets.costs import profile_path, stored_passes
from paceline.targets.identity import is_same, model_key, probe, probe_features
from paceline.targets.native import NativeTarget, available, build
from paceline.targets.native.model import NativeModel, Sizes
from paceline.targets.native.weights import Kind, Packed, Rows
from paceline.targets.span import Span
from targets.test_families import bushy
from targets.test_native import chunked, kinds, make, on_each_set, random_ids
from tiny import small_llama

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler with OpenMP")


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def without_tiles() -> Iterator[None]:
    before = build.instruction_set()
    build.choose([name for name in build.runnable() if name != build.TILES][-1])
    yield
    build.choose(before)


@pytest.fixture(scope="module", params=["llama", "one key/value head", "biases, tied", "qwen3"])
def target(request: pytest.FixtureRequest) -> NativeTarget:
    return NativeTarget(make(request.param).bfloat16())


def product(weight: Tensor, rounds: bool) -> NativeModel:
    """y = W x as a model of its own; `rounds`: x is rounded to bfloat16."""
    rows = Rows.of(weight)
    packed = Packed(rows.kind, rows.inputs, [len(weight)], input_kind=Kind.BF16 if rounds else Kind.F32)
    packed.write(rows.data, packed.places(0))
    return NativeModel(Sizes(rows.inputs), [], None, packed)


def dot_products(x: Tensor, weight: Tensor) -> Tensor:
    """The definition of vdpbf16ps, but for numbers below 2^-126: pair by pair each of the two products, which are exact
    in float32, is added with a rounding of its own.
    """
    left, right = x.bfloat16().float().numpy(), weight.float().numpy()
    sums = np.zeros((len(left), len(right)), np.float32)
    for k in range(left.shape[1]):
        sums += np.multiply.outer(left[:, k], right[:, k])
    return torch.from_numpy(sums)


def products_in_tiles(x: Tensor, weight: Tensor) -> Tensor:
    """The definition of tdpbf16ps, likewise: of 16 pairs the first products are a chain, the second ones another."""
    left, right = x.bfloat16().float().numpy(), weight.float().numpy()
    sums = np.zeros((len(left), len(right)), np.float32)
    for first in range(0, left.shape[1], 32):
        chains = [np.zeros_like(sums), np.zeros_like(sums)]
        for k in range(first, min(first + 32, left.shape[1])):
            chains[k % 2] += np.multiply.outer(left[:, k], right[:, k])
        sums += chains[0] + chains[1]
    return torch.from_numpy(sums)


@pytest.mark.parametrize(("outputs", "inputs"), [(150, 320), (75, 31), (5, 8), (33, 70)])
def test_products_of_every_width(outputs: int, inputs: int) -> None:
    """By any instruction set: those of the definition, and of float32 arithmetic on rounded inputs."""
    draw = torch.Generator().manual_seed(0)
    weight, x = torch.randn(outputs, inputs, generator=draw).bfloat16(), torch.randn(200, inputs, generator=draw)
    rounding, plain = product(weight, rounds=True), product(weight.float(), rounds=False)
    want = dot_products(x, weight)
    assert torch.equal(plain.head(x.bfloat16().float(), normed=True), want)

    def run() -> Tensor:
        defined = products_in_tiles(x, weight) if build.instruction_set() == build.TILES else want
        results = [rounding.head(x[:tokens], normed=True) for tokens in (*range(1, 50), 97, 200)]
        assert all(torch.equal(result, defined[: len(result)]) for result in results)
        return torch.cat(results)

    on_each_set(run, own=[build.TILES])


def test_inputs_are_rounded_to_nearest_even() -> None:
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20, 0.0, -0.0, torch.inf, 3e38])[:, None]
    small, floats = product(torch.ones(1, 1).bfloat16(), rounds=True), product(torch.ones(1, 1), rounds=True)
    for model in (small, floats):
        on_each_set(lambda model=model: model.head(ties, normed=True))
        assert torch.equal(model.head(ties, normed=True), ties.bfloat16().float())


def test_any_width_and_threads_give_the_same_bits(target: NativeTarget, threads: None) -> None:
    ids = random_ids(140)
    torch.set_num_threads(1)
    want = chunked(target, ids, 1)
    torch.set_num_threads(2)
    assert torch.equal(chunked(target, ids, 140), want)
    cache = target.new_cache(1, 140)
    target.prefill(ids[:90].tolist(), cache)
    for width in range(1, 41):
        torch.set_num_threads(1 + width % 2)
        logits = target.forward(Span(ids[None, 90 : 90 + width], cache.lengths.copy()), cache).logits[0]
        assert torch.equal(logits, want[90 : 90 + width]), f"width {width}"


def test_a_path_through_a_tree_is_a_chain(target: NativeTarget) -> None:
    tree, context = bushy(), random_ids(61)
    cache = target.new_cache(1, 77)
    target.prefill(context.tolist(), cache)
    logits = target.forward(tree_span([tree], cache.lengths, target.device), cache).logits[0]
    for node in range(len(tree)):
        path = torch.tensor([tree.tokens[n] for n in tree.path(node)])
        assert torch.equal(logits[node], chunked(target, torch.cat([context, path]), 1)[-1])


def test_a_row_of_a_batch_is_alone_on_each_set(target: NativeTarget) -> None:
    contexts = [random_ids(length, seed=length) for length in (3, 130, 40)]
    ids = random_ids(3, 5)

    def run() -> Tensor:
        batch = target.new_cache(3, 140)
        for row, context in enumerate(contexts):
            target.prefill(context.tolist(), batch.rows(row, row + 1))
        logits = target.forward(Span(ids, batch.lengths.copy()), batch).logits
        for row, context in enumerate(contexts):
            assert torch.equal(logits[row], chunked(target, torch.cat([context, ids[row]]), 1)[-5:])
        return logits

    on_each_set(run, own=[build.TILES])


def test_is_nearer_to_float32_than_hugging_face() -> None:
    """Which rounds after every operation, not at the products alone."""
    ids, model = random_ids(200), make("llama").bfloat16()
    theirs, want = model(ids[None]).logits[0].float(), make("llama").bfloat16().float()(ids[None]).logits[0]
    ours = chunked(NativeTarget(model), ids, 200)
    error = (ours - want).norm() / want.norm()
    assert 1e-4 < error < 0.5 * (theirs - want).norm() / want.norm() < 0.02


def test_weights_are_bfloat16_however_they_are_stored(without_tiles: None) -> None:
    ids, target = random_ids(20), NativeTarget(make("llama").bfloat16())
    floats = NativeTarget(make("llama").bfloat16(), storage="fp32")
    assert (kinds(target), kinds(floats)) == ({Kind.BF16}, {Kind.F32})
    assert target.weight_bytes * 2 == floats.weight_bytes
    assert torch.equal(chunked(target, ids, 7), chunked(floats, ids, 20))


def test_its_costs_are_not_those_of_float32(cache_dir: Path) -> None:
    small, whole = NativeTarget(small_llama().bfloat16()), NativeTarget(small_llama().float())
    assert (small.dtype, small.compute_dtype) == (torch.float32, torch.bfloat16)
    assert (whole.dtype, whole.compute_dtype) == (torch.float32, torch.float32)
    path = profile_path(model_key(small), "cpu", "bfloat16", True, "native", torch.get_num_threads())
    path.parent.mkdir(parents=True)
    path.write_text('{"context": 64, "passes": {"1": {"median": 1.0}, "2": {"median": 2.0}}}')
    assert stored_passes(small) == {64: {1: 1.0, 2: 2.0}}
    assert stored_passes(whole) is None


def test_heads_know_their_model_in_either_type() -> None:
    small, whole = NativeTarget(small_llama().bfloat16()), NativeTarget(small_llama().float())
    other = NativeTarget(small_llama(seed=1).bfloat16())
    for look in (probe_features, lambda some: probe(some, 1)):
        assert is_same(look(small), look(whole))
        assert not is_same(look(other), look(whole))


def test_auto_takes_it_and_it_is_exact() -> None:
    target = make_target(small_llama().bfloat16(), tier="auto", exact=True)
    assert (target.tier, target.exact, target.compute_dtype) == ("native", True, torch.bfloat16)
    assert make_target(small_llama().bfloat16(), tier="auto", exact=False).tier == "torch"


def test_the_peak_of_its_products() -> None:
    """Never much below that of float32, and above it where an instruction multiplies pairs."""
    floats, pairs = (max(build.library().paceline_peak(1, kind) for _ in range(5)) for kind in (False, True))
    assert pairs > 0.5 * floats > 1e7
