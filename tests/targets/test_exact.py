"""Width independence: a token's result has the same bits in every pass, in float32 on the CPU."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.drafting.tree import TokenTree, tree_span
from paceline.targets import exact_ops, load_target
from paceline.targets.linear import PackedLinear, can_pack, is_width_independent, make_width_independent
from paceline.targets.span import Span
from paceline.targets.target import Target
from paceline.targets.torch_tier import make_torch_target
from targets.test_families import BLOCKS, make, random_ids

pytestmark = pytest.mark.skipif(not can_pack(), reason="no oneDNN: nothing is promised")

LENGTH = 40
IDS = random_ids(LENGTH, seed=9).tolist()
FAMILIES = ("llama-tied", "llama-bias", "qwen3", "gpt-neox", "gpt-neox-sequential")


class Steps:
    """A target and what it says one token at a time, from an empty cache on."""

    def __init__(self, target: Target, ids: list[int]) -> None:
        assert target.exact
        self.target, self.ids = target, ids
        self.cache = target.new_cache(1, len(ids) + 3)
        self.logits = torch.cat([self.run([token]) for token in ids])

    @torch.inference_mode()
    def run(self, ids: list[int]) -> Tensor:
        """`[tokens, vocab]`, committed to the cache."""
        logits = self.target.forward(Span(torch.tensor([ids]), self.cache.lengths.copy()), self.cache).logits[0]
        self.cache.commit([range(len(ids))])
        return logits

    def same(self, logits: Tensor, at: int) -> bool:
        return torch.equal(logits, self.logits[at : at + len(logits)])


@pytest.fixture(scope="module", params=FAMILIES)
def steps(request: pytest.FixtureRequest) -> Steps:
    return Steps(make_torch_target(make(request.param).float()), IDS)


def test_every_family_is_exact() -> None:
    for family in BLOCKS:
        assert make_torch_target(make(family).float()).exact, family
    assert not make_torch_target(make("llama")).exact  # float64
    assert not make_torch_target(make("llama").bfloat16()).exact


@given(widths=st.lists(st.integers(1, 17), min_size=1))
@settings(max_examples=30, deadline=None)
def test_chunks(steps: Steps, widths: list[int]) -> None:
    """A prompt in pieces of any widths: logits, keys and values."""
    target, at = steps.target, 0
    with torch.inference_mode():
        cache = target.new_cache(1, LENGTH)
        for width in [*widths, LENGTH]:
            ids = torch.tensor([IDS[at : at + width]])
            if ids.shape[1]:
                assert steps.same(target.forward(Span(ids, cache.lengths.copy()), cache).logits[0], at)
                cache.commit([range(ids.shape[1])])
            at += width
    assert torch.equal(cache.store, steps.cache.store[:, :, :, :, :LENGTH])


@given(chunk=st.integers(1, 64), start=st.integers(1, LENGTH - 1))
@settings(max_examples=20, deadline=None)
def test_prefill_and_taps(steps: Steps, chunk: int, start: int) -> None:
    """Taps cut the pass in two: that must not show either."""
    target = steps.target
    with torch.inference_mode():
        cache = target.new_cache(1, LENGTH)
        prefilled = target.prefill(IDS[:start], cache, [1, 3], chunk)
        out = target.forward(Span(torch.tensor([IDS[start:]]), cache.lengths.copy()), cache, [2])
        whole = target.forward(Span(torch.tensor([IDS]), np.zeros(1, dtype=np.int64)), target.new_cache(1, LENGTH), [1])
        assert steps.same(out.logits[0], start)
        assert torch.equal(prefilled[1], whole.taps[1][0, :start])
        assert steps.same(target.head(prefilled[3]), 0)


@st.composite
def hidden_paths(draw: st.DrawFn) -> tuple[int, TokenTree, list[int]]:
    """A tree behind `start` tokens of IDS, full of nonsense but for one path that continues them."""
    start = draw(st.integers(0, LENGTH - 8))
    depth, size = draw(st.integers(1, 6)), draw(st.integers(1, 40))
    tree, path = TokenTree.root(IDS[start]), [0]
    while len(tree) < size or len(path) <= depth:
        if len(path) <= depth and (len(tree) >= size or draw(st.booleans())):
            path.append(tree.add(IDS[start + len(path)], path[-1], "path"))
        else:
            tree.add(draw(st.integers(0, 63)), draw(st.integers(0, len(tree) - 1)), "noise")
    return start, tree, path


@given(case=hidden_paths(), others=st.lists(st.integers(0, 30), max_size=3), place=st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_trees_in_batches(steps: Steps, case: tuple[int, TokenTree, list[int]], others: list[int], place: int) -> None:
    """A path through a tree, in a batch of ragged rows; then, committed, a step behind it."""
    target, (start, tree, path) = steps.target, case
    mine = min(place, len(others))
    lengths = [*others[:mine], start, *others[mine:]]
    with torch.inference_mode():
        cache = target.new_cache(len(lengths), 90)
        for row, length in enumerate(lengths):
            ids = IDS[:start] if row == mine else random_ids(length, seed=row).tolist()
            target.prefill(ids, cache.rows(row, row + 1))
        trees = [tree if row == mine else TokenTree.root(row) for row in range(len(lengths))]
        out = target.forward(tree_span(trees, cache.lengths, target.device), cache)
        assert steps.same(out.row(mine, len(tree)).logits[path], start)
        cache.commit([path if row == mine else [0] for row in range(len(lengths))])
        step = torch.full((len(lengths), 1), IDS[start + len(path)])
        logits = target.forward(Span(step, cache.lengths.copy()), cache).logits
        assert steps.same(logits[mine], start + len(path))


@given(pieces=st.lists(st.integers(1, 4), min_size=1, max_size=5))
@settings(max_examples=20, deadline=None)
def test_draft_region_in_pieces(steps: Steps, pieces: list[int]) -> None:
    target, at = steps.target, 10
    with torch.inference_mode():
        cache = target.new_cache(1, LENGTH)
        target.prefill(IDS[:at], cache)
        offset = 0
        for width in pieces:
            ids = torch.tensor([IDS[at + offset : at + offset + width]])
            logits = target.forward(Span(ids, cache.lengths.copy(), offset), cache).logits[0]
            assert steps.same(logits, at + offset)
            offset += width


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads(steps: Steps, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_ops, "_ALONE", 0)  # else so little work stays on one
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            cache = steps.target.new_cache(1, LENGTH)
            span = Span(torch.tensor([IDS]), cache.lengths.copy())
            assert steps.same(steps.target.forward(span, cache).logits[0], 0)
    finally:
        torch.set_num_threads(before)


# -- what it rests on --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (100, 20)])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_product_at_every_width(shape: tuple[int, int], bias: bool) -> None:
    linear = PackedLinear(torch.randn(shape), torch.randn(shape[0]) if bias else None)
    assert make_width_independent([linear])
    x = torch.randn(512, shape[1])
    whole = linear(x)
    for width in [*range(1, 65), 100, 128, 200, 256, 511]:
        assert torch.equal(linear(x[:width]), whole[:width]), width
    assert torch.equal(torch.cat([linear(x[i : i + 1]) for i in range(70)]), whole[:70])


@pytest.mark.parametrize("width", [1, 2, 5, 16, 31, 64, 512])
def test_a_product_that_depends_on_the_width_is_found(width: int) -> None:
    class Fickle(PackedLinear):
        def __call__(self, x: Tensor) -> Tensor:
            out = super().__call__(x)
            return out * (1 + 2e-7) if len(x) == width else out

    assert not is_width_independent(Fickle(torch.randn(64, 32)))
    assert not make_width_independent([Fickle(torch.randn(64, 32))])


def test_a_kernel_of_its_own_for_one_row_is_gone_around() -> None:
    class Fickle(PackedLinear):
        def _product(self, x: Tensor) -> Tensor:
            return super()._product(x) * (1 + 2e-7 * (len(x) == 1))

    linears = [Fickle(torch.randn(64, 32)) for _ in range(2)]
    assert not is_width_independent(linears[0])
    assert make_width_independent(linears)
    x = torch.randn(3, 32)
    for linear in linears:
        assert torch.equal(linear(x[:1]), linear(x)[:1])


def test_exponential() -> None:
    from numba import njit

    from paceline.targets.kernels import exp

    x = np.linspace(-86, 86, 200_001, dtype=np.float32)
    got = njit(lambda values: [exp(value) for value in values])(x)
    np.testing.assert_allclose(got, np.exp(x.astype(np.float64)), rtol=1.5e-7)
    assert njit(lambda: exp(np.float32(-math.inf)))() < 1e-37


# -- the default model -------------------------------------------------------------------------------------------------
PROMPT = (Path(__file__).parents[2] / "LICENSE").read_text()[:1600]


@pytest.fixture(scope="module")
def real() -> Steps:
    model = load_target("smollm2-135m", tier="reference")
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(PROMPT)[:300]
    target = make_torch_target(model.model)
    steps = Steps.__new__(Steps)
    steps.target, steps.ids, steps.cache = target, ids, target.new_cache(1, 320)
    assert target.exact
    target.prefill(ids[:270], steps.cache, chunk=90)
    steps.logits = torch.cat([steps.run([token]) for token in ids[270:]])
    return steps


@pytest.mark.model
@pytest.mark.parametrize("widths", [[30], [7, 8, 15], [2] * 15])
@torch.inference_mode()
def test_real_prompt_in_chunks(real: Steps, widths: list[int]) -> None:
    cache = real.target.new_cache(1, 512)
    real.target.prefill(real.ids[:270], cache)
    assert torch.equal(cache.store[:, :, :, :, :270], real.cache.store[:, :, :, :, :270])
    at = 270
    for width in widths:
        logits = real.target.forward(
            Span(torch.tensor([real.ids[at : at + width]]), cache.lengths.copy()), cache
        ).logits
        cache.commit([range(width)])
        assert real.same(logits[0], at - 270)
        at += width


@pytest.mark.model
@torch.inference_mode()
def test_real_prompt_in_trees_and_batches(real: Steps) -> None:
    target, ids = real.target, real.ids
    tree, path = TokenTree.root(ids[270]), [0]
    for depth in range(1, 9):  # between the true tokens, three false ones each
        for wrong in range(3):
            tree.add(1000 * depth + wrong, path[-1], "noise")
        path.append(tree.add(ids[270 + depth], path[-1], "path"))
    chain = TokenTree.root(ids[100])
    chain.add_path(ids[101:107], "chain")
    trees = [chain, tree, TokenTree.root(7)]
    cache = target.new_cache(3, 400)
    for row, length in enumerate((100, 270, 40)):
        target.prefill(ids[:length], cache.rows(row, row + 1), chunk=200)
    out = target.forward(tree_span(trees, cache.lengths, target.device), cache)
    assert real.same(out.row(1, len(trees[1])).logits[path], 0)
    cache.commit([[0], path, [0]])
    step = torch.tensor([[5], [ids[279]], [6]])
    assert real.same(target.forward(Span(step, cache.lengths.copy()), cache).logits[1], 9)
