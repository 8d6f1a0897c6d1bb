"""The torch tier against the reference tier: every family, in float64 (torch operations) and float32 (the kernels)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

from paceline.decoding.engine import Engine
from paceline.decoding.request import Request
from paceline.drafters.none import NoDrafter
from paceline.drafting.tree import TokenTree, tree_span
from paceline.errors import ModelError, UnsupportedModel
from paceline.policies.fixed import Fixed
from paceline.targets.cache import KVCache
from paceline.targets.linear import PackedLinear, PackedRows, PlainLinear, can_pack
from paceline.targets.reference import as_target
from paceline.targets.span import Span
from paceline.targets.target import Target
from paceline.targets.torch_tier import TorchTarget, make_torch_target
from targets.test_families import BLOCKS, CONTEXT, bushy, make, random_ids
from tiny import small_llama

TYPES = {"float64": torch.float64, "float32": torch.float32}
TOLERANCE = {torch.float64: 1e-4, torch.float32: 4e-4}  # norms of some families are float32 in a float64 model


class Tiers(NamedTuple):
    reference: Target
    torch: TorchTarget

    def close(self, got: Tensor, want: Tensor) -> None:
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[self.torch.dtype])

    def run(self, scenario: Callable[[Target], list[Tensor]]) -> None:
        for got, want in zip(scenario(self.torch), scenario(self.reference), strict=True):
            self.close(got, want)


@pytest.fixture(scope="module", params=[(family, dtype) for family in BLOCKS for dtype in TYPES], ids="-".join)
def tiers(request: pytest.FixtureRequest) -> Tiers:
    family, dtype = request.param
    model = make(family).to(TYPES[dtype])
    taken = make_torch_target(copy.deepcopy(model))
    assert isinstance(taken, TorchTarget)
    assert taken.tier == "torch"
    return Tiers(as_target(model), taken)


def filled(target: Target, lengths: list[int], capacity: int = 60) -> KVCache:
    """A cache with a prompt of its own in each row."""
    cache = target.new_cache(len(lengths), capacity)
    for row, length in enumerate(lengths):
        target.prefill(random_ids(length, seed=length).tolist(), cache.rows(row, row + 1), chunk=8)
    return cache


@torch.inference_mode()
def test_prompt_and_steps(tiers: Tiers) -> None:
    def scenario(target: Target) -> list[Tensor]:
        cache, ids = target.new_cache(1, 20), random_ids(1, 20)
        seen = [*target.prefill(ids[0, :9].tolist(), cache, [1, 3], chunk=4).values()]
        for at in range(9, 12):
            seen.append(target.forward(Span(ids[:, at : at + 1], cache.lengths.copy()), cache).logits)
            cache.commit([[0]])
        return [*seen, target.forward(Span(ids[:, 12:], cache.lengths.copy()), cache).logits]

    tiers.run(scenario)


@torch.inference_mode()
def test_whole_prompt_in_one_pass(tiers: Tiers) -> None:
    """A chain over an empty cache: the mask's default."""
    tiers.run(lambda target: [target.forward(Span(random_ids(3, 9), np.zeros(3)), target.new_cache(3, 9)).logits])


@torch.inference_mode()
def test_ragged_trees_and_commits(tiers: Tiers) -> None:
    chain, root = TokenTree.root(9), TokenTree.root(10)
    chain.add_path([11, 12, 13], "x")
    trees = [bushy(), root, chain, bushy()]

    def scenario(target: Target) -> list[Tensor]:
        cache, seen = filled(target, [5, 17, 0, 30]), []
        for _ in range(3):
            out = target.forward(tree_span(trees, cache.lengths, target.device), cache)
            seen += [out.row(row, len(tree)).logits for row, tree in enumerate(trees)]
            cache.commit([[0, 2, 4, 8], [0], [0, 1, 2], [0]])
        return seen

    tiers.run(scenario)


@torch.inference_mode()
def test_draft_region_in_pieces(tiers: Tiers) -> None:
    """Chains, then a tree, behind what a drafter has put into the draft region before."""
    ids = random_ids(2, 9)

    def scenario(target: Target) -> list[Tensor]:
        cache = filled(target, [6, 8])
        seen = [target.forward(Span(ids[:, i : i + 1], cache.lengths, i), cache).logits for i in range(2)]
        depths = torch.tensor([[2, 2, 3], [2, 3, 3]])
        ancestors = torch.tensor(
            [[[1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]], [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]]
        ).bool()
        span = Span(ids[:, 2:5], cache.lengths.copy(), 2, depths, ancestors)
        return [*seen, target.forward(span, cache).logits]

    tiers.run(scenario)


@torch.inference_mode()
def test_single_steps_of_level_and_ragged_rows(tiers: Tiers) -> None:
    def scenario(target: Target) -> list[Tensor]:
        seen = []
        for lengths in ([9, 9, 9], [9, 2, 14]):
            cache = filled(target, lengths)
            seen.append(target.forward(Span(random_ids(3, 1), cache.lengths.copy()), cache).logits)
        return seen

    tiers.run(scenario)


@torch.inference_mode()
def test_blocks_taps_and_skips(tiers: Tiers) -> None:
    skips = [(), [(1, "attention")], [(0, "mlp"), (2, "attention")], [(1, "attention"), (1, "mlp")], [(2, "mlp")]]

    def scenario(target: Target) -> list[Tensor]:
        seen = []
        for skip in skips:
            cache = filled(target, [7, 3])
            span = Span(random_ids(2, 5), cache.lengths.copy())
            hidden = target.embed(span)
            first = target.layers(hidden, span, cache, 0, 2, skip)
            rest = target.layers(first, span, cache, 2, 3, skip)
            seen += [hidden, first, rest, target.head(rest), target.head(rest[0, 1])]
            assert torch.equal(target.layers(first, span, cache, 1, 1), first)
        return seen

    tiers.run(scenario)


@torch.inference_mode()
def test_padding_behind_the_end_of_the_context(tiers: Tiers) -> None:
    """Padding nodes may have positions that the model has not; the others are as ever."""

    def scenario(target: Target) -> list[Tensor]:
        cache = filled(target, [CONTEXT - 2, 4], CONTEXT + 6)
        logits = target.forward(Span(random_ids(2, 6), cache.lengths.copy()), cache).logits
        return [logits[0, :2], logits[1]]

    tiers.run(scenario)


def test_greedy_output_through_the_engine(tiers: Tiers) -> None:
    def output(target: Target) -> list[list[int]]:
        prompts = [random_ids(n, seed=n).tolist() for n in (3, 9)]
        requests = [Request(prompt, limit=12, policy=Fixed(k=0)) for prompt in prompts]
        for _ in Engine(target, NoDrafter(target)).run(requests):
            pass
        return [request.ids for request in requests]

    assert output(tiers.torch) == output(tiers.reference)


def test_the_model_is_of_no_use_afterwards() -> None:
    model = small_llama()
    target = make_torch_target(model)
    assert target.model is model
    assert target.eos == (256,)
    assert all(weight.is_meta for weight in model.parameters())
    for call in (model, model.generate, model.model):
        with pytest.raises(ModelError, match="load the model again"):
            call(torch.tensor([[1]]))


@pytest.mark.parametrize("dtype", TYPES.values())
@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_not_stored_twice(tied: bool, dtype: torch.dtype) -> None:
    model = small_llama(hidden_size=64, intermediate_size=128, vocab_size=640, tie_word_embeddings=tied).to(dtype)
    expected = sum(weight.nbytes for weight in model.parameters() if weight.dim() == 2)
    target = make_torch_target(model)
    assert isinstance(target, TorchTarget)
    stored = 0
    for linear in target.weights.linears:
        if isinstance(linear, PackedLinear):
            stored += torch.ops.mkldnn._nbytes(linear.packed)
        else:
            stored += linear.weight.nbytes
    shared = tied and (isinstance(target.weights.embed, PackedRows) or dtype == torch.float64)
    assert stored + (0 if shared else 640 * 64 * dtype.itemsize) == expected


@pytest.mark.skipif(not can_pack(), reason="no oneDNN")
@pytest.mark.parametrize("shape", [(257, 32), (640, 64), (100, 100), (48, 20)])
def test_rows_read_from_the_packed_matrix(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    rows = PackedRows.of(PackedLinear(weight), weight)
    assert rows is not None
    ids = torch.randint(0, shape[0], (9,))
    assert torch.equal(rows(ids), weight[ids])
    assert PackedRows.of(PackedLinear(weight), weight + 1) is None


@pytest.mark.skipif(not can_pack(), reason="no oneDNN")
def test_packed_product() -> None:
    weight, bias, x = torch.randn(50, 20), torch.randn(50), torch.randn(7, 20)
    torch.testing.assert_close(PackedLinear(weight, bias)(x), PlainLinear(weight, bias)(x))


def test_a_long_cache_gets_its_positions() -> None:
    model = small_llama(max_position_embeddings=8192).float()
    tiers = Tiers(as_target(copy.deepcopy(model)), make_torch_target(model))

    def scenario(target: Target) -> list[Tensor]:
        cache = target.new_cache(1, 6000)
        cache.lengths[0] = 5000
        return [target.forward(Span(torch.tensor([[1, 2]]), cache.lengths.copy()), cache).logits]

    with torch.inference_mode():
        tiers.run(scenario)


def test_a_pass_beyond_the_cache_is_refused() -> None:
    target = make_torch_target(small_llama().float())
    cache = target.new_cache(1, 4)
    cache.lengths[0] = 3
    with pytest.raises((IndexError, RuntimeError)), torch.inference_mode():
        target.forward(Span(torch.tensor([[1, 2]]), cache.lengths.copy()), cache)


REFUSED = {
    "relu2": lambda: small_llama(hidden_act="relu2"),
    "dynamic": lambda: small_llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    "gpt2": lambda: make("gpt2"),
    "several types": lambda: mixed(small_llama()),
    "adapters": lambda: adapted(small_llama()),
    "not in memory": lambda: small_llama().to("meta"),
}


def mixed(model: hf.PreTrainedModel) -> hf.PreTrainedModel:
    model.model.norm.float()
    return model


def adapted(model: hf.PreTrainedModel) -> hf.PreTrainedModel:
    class Lora(torch.nn.Linear):
        pass

    model.model.layers[1].mlp.up_proj = Lora(32, 64, bias=False, dtype=model.dtype)
    return model


@pytest.mark.parametrize("word", REFUSED)
def test_refused_untouched(word: str) -> None:
    model = REFUSED[word]()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with pytest.raises(UnsupportedModel, match=word):
        make_torch_target(model)
    for name, weight in model.named_parameters():
        assert weight.is_meta or torch.equal(weight, before[name])
