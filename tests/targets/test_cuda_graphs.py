"""Static passes: on the CPU what graphs are made of, run as it is; on a GPU the graphs."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Iterator

import pytest
import torch

from paceline.decoding.engine import Engine
from paceline.decoding.request import Request
from paceline.drafters.none import NoDrafter
from paceline.drafters.prompt_lookup import PromptLookup
from paceline.drafting.tree import TokenTree, tree_span
from paceline.policies.fixed import Fixed
from paceline.targets.cache import KVCache
from paceline.targets.cuda_graphs import WIDTHS, GraphTarget, StaticPass, make_graph_target
from paceline.targets.reference import as_target
from paceline.targets.span import Span
from paceline.targets.target import Target
from paceline.targets.torch_tier import TorchTarget, make_torch_target
from targets.test_families import bushy, make, random_ids
from tiny import small_llama
from tiny_families import tiny

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class Uncaptured(GraphTarget):
    make_pass = StaticPass


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[gpu, pytest.mark.gpu])])
def targets(request: pytest.FixtureRequest) -> tuple[Target, GraphTarget]:
    """The plain target, and the one with static passes, in float64."""
    model = make("llama-gqa").to(request.param)
    kind = GraphTarget if request.param == "cuda" else Uncaptured
    return TorchTarget(copy.deepcopy(model)), kind(model)


def prompts(target: Target, lengths: list[int], capacity: int = 60) -> KVCache:
    cache = target.new_cache(len(lengths), capacity)
    for row, length in enumerate(lengths):
        target.prefill(random_ids(length, seed=length).tolist(), cache.rows(row, row + 1))
    return cache


def test_no_graphs_where_tokens_choose_experts() -> None:
    kinds = {variant: type(make_graph_target(tiny(variant))) for variant in ("llama", "mixtral")}
    assert kinds == {"llama": GraphTarget, "mixtral": TorchTarget}


def test_windows_take_one_tensor_too() -> None:
    cache = GraphTarget(tiny("mistral-windows")).new_cache(1, 2000)
    assert isinstance(cache, KVCache)
    assert cache.store.shape[4] >= 2000


@torch.inference_mode()
def test_same_as_without(targets: tuple[Target, GraphTarget]) -> None:
    """Chains of every padded width, trees, chains again, ragged rows, fewer rows; taps; commits in between."""
    chain = TokenTree.root(9)
    chain.add_path([11, 12, 13], "x")
    rounds = [[bushy(), chain], [TokenTree.root(3), TokenTree.root(4)], [chain, bushy()], [chain, chain], [bushy()]]
    seen = []
    for target in targets:
        cache, outputs = prompts(target, [5, 17]), []
        for trees in rounds:
            rows = cache.rows(0, len(trees))
            out = target.forward(tree_span(trees, rows.lengths, target.device), rows, [1])
            outputs += [out.row(row, len(tree)) for row, tree in enumerate(trees)]
            rows.commit([tree.path(len(tree) - 1) for tree in trees])
        for width in (1, 2, 3, 7):
            ids = random_ids(2, width).to(target.device)
            span = Span(ids, cache.lengths.copy())
            entering = target.layers(target.embed(span), span, cache, 0, 1)
            outputs.append(target.forward(span, cache, [1], 1, entering))
            outputs.append(target.forward(span, cache))
            cache.commit([[0], range(width)])
        seen.append(outputs)
    for want, got in zip(*seen, strict=True):
        torch.testing.assert_close(got.logits, want.logits, rtol=0, atol=1e-9)
        torch.testing.assert_close(got.taps, want.taps, rtol=0, atol=1e-9)


@torch.inference_mode()
def test_outputs_outlive_the_next_pass(targets: tuple[Target, GraphTarget]) -> None:
    target = targets[1]
    cache = prompts(target, [5])
    first = target.forward(Span(torch.tensor([[1]], device=target.device), cache.lengths.copy()), cache, [1])
    kept = first.logits.clone(), first.taps[1].clone()
    target.forward(Span(torch.tensor([[2]], device=target.device), cache.lengths.copy()), cache, [1])
    assert torch.equal(first.logits, kept[0])
    assert torch.equal(first.taps[1], kept[1])


@gpu
@torch.inference_mode()
def test_graphs_keep_the_angles_that_they_were_captured_with() -> None:
    target = make_torch_target(small_llama(max_position_embeddings=16384).to("cuda", torch.float32))
    cache = prompts(target, [5])
    span = Span(torch.tensor([[1]], device="cuda"), cache.lengths.copy())
    want, size = target.forward(span, cache).logits.clone(), target.ops.ropes[0].cos.shape
    target.prefill([1, 2, 3], target.new_cache(1, 8000))  # the tables grow
    torch.cuda.synchronize()
    junk = [torch.full(size, 7.0, device="cuda") for _ in range(200)]  # takes what is free
    torch.testing.assert_close(target.forward(span, cache).logits, want)
    assert junk


@torch.inference_mode()
def test_storage_is_lent_again(targets: tuple[Target, GraphTarget]) -> None:
    target = targets[1]
    cache = target.new_cache(2, 30)
    at, view = cache.store.data_ptr(), cache.rows(0, 1).rows(0, 1)
    del cache
    gc.collect()
    other = target.new_cache(2, 30)
    assert other.store.data_ptr() != at  # the view still uses it
    del view
    gc.collect()
    again = target.new_cache(2, 20)
    assert again.store.data_ptr() == at
    assert again.lengths.tolist() == [0, 0]
    assert again.capacity >= 20 + WIDTHS[-1]
    del again
    gc.collect()
    assert target.new_cache(3, 30).store.shape[2] == 3


def test_decoding(targets: tuple[Target, GraphTarget]) -> None:
    ids = []
    for target in targets:
        for _ in range(2):  # the second time over the first one's storage
            requests = [Request([1, 2, 3, 1, 2] * n, limit=12 + n, policy=Fixed(k=5)) for n in (1, 3, 2)]
            for _ in Engine(target, PromptLookup(target)).run(requests, batch=2):
                pass
            gc.collect()
            ids.append([request.ids for request in requests])
    assert ids[0] == ids[1] == ids[2] == ids[3]


# -- on a GPU only -----------------------------------------------------------------------------------------------------
@pytest.fixture
def no_warnings_left() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_near_the_reference(dtype: torch.dtype) -> None:
    model = small_llama(hidden_size=256, num_attention_heads=4, initializer_range=0.05).to("cuda", dtype)
    reference, target = as_target(copy.deepcopy(model)), make_torch_target(model)
    assert isinstance(target, GraphTarget)
    assert not target.exact
    with torch.inference_mode():
        logits = []
        for each in (reference, target):
            cache = prompts(each, [20, 3])
            out = each.forward(tree_span([bushy(), bushy()], cache.lengths, each.device), cache)
            logits.append(out.logits.float())
    error = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 1e-1}[dtype]
    assert (logits[0] - logits[1]).abs().max() < error * logits[0].abs().max()


@gpu
@pytest.mark.gpu
@pytest.mark.usefixtures("no_warnings_left")
def test_one_synchronisation_a_round() -> None:
    target = make_torch_target(small_llama().to("cuda", torch.bfloat16))
    request = Request([1, 2, 3, 4] * 5, limit=60, policy=Fixed(k=4))
    rounds = Engine(target, NoDrafter(target)).run([request])
    for _ in range(5):  # graphs are captured
        next(rounds)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(10):
            next(rounds)
    synchronised = [warning for warning in caught if "synchroniz" in str(warning.message)]
    assert 0 < len(synchronised) <= 10
