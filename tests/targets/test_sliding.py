"""The cache of the fast tiers drops what lies before all windows, and nothing else changes by that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from helpers import Oracle, hf_greedy, one_thread  # noqa: F401
from paceline.decoding.engine import Engine
from paceline.decoding.prefixes import NOTHING, PrefixStore
from paceline.decoding.request import Request
from paceline.drafting.tree import tree_span
from paceline.policies.fixed import Fixed
from paceline.targets import sliding
from paceline.targets.cache import KVCache
from paceline.targets.native import NativeTarget, available
from paceline.targets.sliding import SlidingCache
from paceline.targets.span import Span
from paceline.targets.target import Target
from paceline.targets.torch_tier import make_inexact_torch_target, make_torch_target
from targets.test_families import bushy
from tiny_families import VOCAB, tiny

native = pytest.param(NativeTarget, marks=pytest.mark.skipif(not available(), reason="no C++ compiler"), id="native")
FAST = [native, pytest.param(make_torch_target, id="torch"), pytest.param(make_inexact_torch_target, id="inexact")]
Make = Callable[..., Target]
PROMPTS = [[5, 9, 17], list(range(40, 80)), [7, 11, 13] * 4]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little room behind windows of 9, so that rows move again and again."""
    monkeypatch.setattr(sliding, "ROOM", 20)
    monkeypatch.setattr(sliding, "REGION", 6)


def text(length: int, seed: int = 0) -> list[int]:
    found: list[int] = torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


def rounds(target: Target, cache: KVCache) -> Tensor:
    """Logits of trees and chains behind two texts, one of which ends."""
    seen = []
    for row, length in enumerate((3, 60)):
        target.prefill(text(length, row), cache.rows(row, row + 1), chunk=13)
    tree = bushy()
    for _ in range(4):
        span = tree_span([tree, tree], cache.lengths, target.device)
        lower = target.layers(target.embed(span), span, cache, 0, 1)
        seen.append(target.forward(span, cache, start=1, hidden=lower).logits)
        cache.commit([tree.path(len(tree) - 1), [0]])
    cache.move(1, 0)
    one = cache.rows(0, 1)
    for step in range(30):
        seen.append(target.forward(Span(torch.tensor([[step]]), one.lengths.copy()), one).logits)
        one.commit([[0]])
    one.lengths -= 5  # taken back
    seen.append(target.forward(Span(torch.tensor([text(5)]), one.lengths.copy()), one).logits)
    cache.lengths[0] = 0  # another text in its place
    target.prefill(text(25, 2), one)  # at once: more than there is room for
    seen.append(target.forward(Span(torch.tensor([[1]]), one.lengths.copy()), one).logits)
    return torch.cat([logits.flatten(0, 1) for logits in seen])


@pytest.mark.parametrize("make", FAST)
@pytest.mark.parametrize("variant", ["gemma2", "mistral-windows", "gpt_oss"])
@pytest.mark.usefixtures("narrow")
@torch.inference_mode()
def test_the_same_as_of_all_keys(variant: str, make: Make) -> None:
    target = make(tiny(variant))
    cache = target.new_cache(2, 160)
    assert isinstance(cache, SlidingCache)
    whole = KVCache.allocate(target.cache_shape(), 2, 160, target.dtype, target.device)
    got, want = rounds(target, cache), rounds(target, whole)
    assert cache.bases.any()
    if target.exact:
        assert torch.equal(got, want)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5 * float(want.abs().max()))


@pytest.mark.parametrize("make", FAST)
@pytest.mark.usefixtures("narrow")
@torch.inference_mode()
def test_greedy_text_is_that_of_generate(make: Make) -> None:
    truths = {tuple(prompt): hf_greedy(tiny("gemma3"), prompt, 60) for prompt in PROMPTS}
    target = make(tiny("gemma3"))
    requests = [Request(prompt, limit=60, policy=Fixed(k=6)) for prompt in PROMPTS]
    for _ in Engine(target, Oracle(target, truths)).run(requests, batch=2):
        pass
    assert [request.output for request in requests] == list(truths.values())


def numbers(target: Target, capacity: int) -> int:
    return sum(part.numel() for part in target.new_cache(1, capacity).tensors)


@pytest.mark.parametrize("make", FAST)
def test_memory_does_not_grow_with_the_text(make: Make) -> None:
    """But in the one layer of three of gemma2 that sees all: 2 heads of 14 numbers."""
    target, room = make(tiny("mistral-windows")), 9 - 1 + sliding.ROOM
    assert numbers(target, 10_000) == numbers(target, 100_000) == 3 * 2 * 2 * 14 * room
    assert numbers(target, 100) == 3 * 2 * 2 * 14 * 100
    target = make(tiny("gemma2"))
    assert numbers(target, 10_000) == 2 * 2 * 14 * (10_000 + 2 * room)


@pytest.mark.usefixtures("narrow")
@torch.inference_mode()
def test_what_a_cache_refuses() -> None:
    target = make_inexact_torch_target(tiny("mistral-windows"))
    cache = target.new_cache(1, 100)
    target.prefill(text(90), cache, chunk=10)
    cache.lengths[:] = 60
    with pytest.raises(IndexError, match="more tokens were taken back than the cache keeps"):
        target.forward(Span(torch.tensor([[1]]), cache.lengths.copy()), cache)
    cache.clear()
    cache.lengths[:] = 98
    with pytest.raises(IndexError, match="exceeds the cache's capacity of 100"):
        target.forward(Span(torch.tensor([[1, 2, 3]]), cache.lengths.copy()), cache)
    target.forward(Span(torch.tensor([[1, 2]]), cache.lengths.copy()), cache)  # of nothing, as costs are measured
    store = PrefixStore(50)
    store.allocate(cache)
    assert store.restore(text(20), cache, ()) == NOTHING


@pytest.mark.usefixtures("narrow")
@torch.inference_mode()
def test_what_is_reserved_may_be_taken_back() -> None:
    target = make_inexact_torch_target(tiny("mistral-windows"))
    cache = target.new_cache(1, 150)
    cache.reserve(30)
    target.prefill(text(80), cache, chunk=10)
    want = target.forward(Span(torch.tensor([[1]]), cache.lengths.copy()), cache).logits
    target.prefill(text(30), cache, chunk=10)
    cache.lengths -= 30
    again = target.forward(Span(torch.tensor([[1]]), cache.lengths.copy()), cache).logits
    torch.testing.assert_close(again, want, rtol=0, atol=2e-5 * float(want.abs().max()))
