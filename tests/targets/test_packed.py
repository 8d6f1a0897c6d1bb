"""Passes over batches without padding: each row has the bits that it has alone, and nothing else is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import one_thread  # noqa: F401
from paceline.drafting.tree import TokenTree, tree_span
from paceline.targets.native import NativeTarget, available
from paceline.targets.span import Span
from paceline.targets.target import PassOutput, Target
from paceline.targets.torch_tier import make_torch_target
from targets.test_families import bushy
from targets.test_native import random_ids
from tiny import small_llama
from tiny_families import tiny

LENGTHS = (50, 3, 0, 20)
ROUGH = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}

needs_compiler = pytest.mark.skipif(not available(), reason="no C++ compiler with OpenMP")
MAKERS = {
    "native": (lambda: NativeTarget(small_llama().float()), needs_compiler),
    "native, rough head": (lambda: NativeTarget(small_llama(**ROUGH).float(), storage="rounded"), needs_compiler),
    "native, windows": (lambda: NativeTarget(tiny("gemma2").float()), needs_compiler),
    "torch": (lambda: make_torch_target(small_llama().float()), ()),
    "torch, windows": (lambda: make_torch_target(tiny("gemma2").float()), ()),
}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(
    scope="module", params=[pytest.param(make, id=name, marks=mark) for name, (make, mark) in MAKERS.items()]
)
def target(request: pytest.FixtureRequest) -> Target:
    made: Target = request.param()
    assert made.packs
    return made


def chain(size: int) -> TokenTree:
    tree = TokenTree.root(7)
    tree.add_path(range(8, 7 + size), "x")
    return tree


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("last", [chain(2), bushy()])
def test_rows_have_what_they_have_alone(target: Target, last: TokenTree, greedy: bool) -> None:
    taps = (1, target.num_layers)
    forward: Callable[..., PassOutput] = target.forward_greedy if greedy else target.forward
    trees = [chain(4), chain(1), chain(7), last]
    cache, alone = target.new_cache(4, 80), [target.new_cache(1, 80) for _ in LENGTHS]
    for row, length in enumerate(LENGTHS):
        for own in (cache.rows(row, row + 1), alone[row]):
            target.prefill(random_ids(length, seed=row).tolist(), own)
    before = [tensor.clone() for tensor in cache.tensors]
    out = forward(tree_span(trees, cache.lengths, target.device), cache, taps)
    for row, (tree, own) in enumerate(zip(trees, alone, strict=True)):
        expected = target.forward(tree_span([tree], own.lengths, target.device), own, taps)
        part = out.row(row, len(tree))
        assert torch.equal(part.logits, expected.logits[0])
        assert out.choices()[row] == expected.choices()[0]
        assert all(torch.equal(part.taps[tap], expected.taps[tap][0]) for tap in taps)
        if any(target.windows):
            continue  # its cache is a ring
        end = LENGTHS[row] + len(tree)
        for tensor, old, told in zip(cache.tensors, before, own.tensors, strict=True):
            assert torch.equal(tensor[:, :, row, :, :end], told[:, :, 0, :, :end])
            assert torch.equal(tensor[:, :, row, :, end:], old[:, :, row, :, end:])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_places(sizes: list[int]) -> None:
    span = tree_span([chain(size) for size in sizes], np.zeros(len(sizes), np.int64), torch.device("cpu"))
    assert (span.counts is None) == (len(set(sizes)) == 1)
    assert span.tokens == sum(sizes)
    assert span.inside.sum(1).tolist() == sizes
    assert span.firsts == [sum(sizes[:row]) for row in range(len(sizes))]
    whole = Span(span.ids, span.starts)
    assert (whole.tokens, whole.firsts[-1]) == (span.ids.numel(), (len(sizes) - 1) * span.width)
