"""Passes over a few tokens on the torch tier: loops and forms of weights of their own, and the same bits."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import paceline
from paceline.targets import team
from paceline.targets.compact import compact
from paceline.targets.linear import PackedLinear, PackedRows, can_pack, make_width_independent, quicken
from paceline.targets.span import Span
from paceline.targets.torch_tier import TorchTarget, make_torch_target
from tiny import small_llama
from tiny_families import tiny

pytestmark = pytest.mark.skipif(not can_pack() or not team.available(), reason="no oneDNN, or no threads for kernels")

SHAPES = [(64, 32), (48, 64), (80, 576), (192, 1536), (576, 1536)]
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
WIDTHS = [*range(1, 35), 48, 64, 65, 97, 127, 128]


def halves(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs).bfloat16().float()


def multiples(outputs: int, inputs: int) -> Tensor:
    """As GGUF's Q8_0 gives them."""
    numbers = torch.randint(-127, 128, (outputs, inputs // 32, 32)).float()
    numbers[:, :, 5] = 127
    return (numbers * torch.rand(outputs, inputs // 32, 1).half().float()).view(outputs, inputs)


def digits(outputs: int, inputs: int) -> Tensor:
    """As GGUF's Q4_1 gives them."""
    numbers = torch.randint(0, 16, (outputs, inputs // 32, 32)).float()
    numbers[:, :, 3], numbers[:, :, 9] = 0, 15
    factor, offset = torch.rand(2, outputs, inputs // 32, 1).half().float()
    return (numbers * factor - offset).view(outputs, inputs)


def float16(outputs: int, inputs: int) -> Tensor:
    weight = torch.randn(outputs, inputs)
    weight[0, :2] = torch.tensor([6e-8, -3e-6])  # subnormal
    return weight.half().float()


def symmetric_digits(outputs: int, inputs: int) -> Tensor:
    """As GGUF's Q4_0 gives them: the weight farthest from zero is -8 times the factor, which may be negative."""
    numbers = torch.randint(1, 15, (outputs, inputs // 32, 32)).float()
    numbers[:, :, 7] = 0
    factor = torch.randn(outputs, inputs // 32, 1).half().float()
    return ((numbers - 8) * factor).view(outputs, inputs)


FORMS = {"float32": torch.randn, "bfloat16": halves, "float16": float16, "blocks8": multiples, "blocks4": digits}


def narrow(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    linear = PackedLinear(weight, bias)
    if not quicken([linear], linear.probe()):
        pytest.skip("this CPU's oneDNN sums in an order that is not known")
    return linear


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_bits_of_every_form(form: str, shape: tuple[int, int], bias: bool) -> None:
    linear = narrow(FORMS[form](*shape), torch.randn(shape[0]) if bias else None)
    assert linear.narrow is not None
    assert linear.narrow.form == form
    assert make_width_independent([linear])
    x = torch.randn(max(WIDTHS), shape[1])
    expected = linear._product(x)
    for width in WIDTHS:
        assert torch.equal(linear.narrow(x[:width]), expected[:width]), width


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(form: str, threads: int) -> None:
    linear, x = narrow(FORMS[form](80, 64)), torch.randn(7, 64)
    assert linear.narrow is not None
    expected, before = linear._product(torch.cat([x] * 4))[:7], torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(linear.narrow(x), expected)
    finally:
        torch.set_num_threads(before)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["bfloat16", "float16", "blocks8", "blocks4"]), st.integers(0, 63), st.integers(0, 95))
def test_one_other_weight_and_the_form_is_not_taken(form: str, row: int, column: int) -> None:
    weight = FORMS[form](64, 96)
    changed = weight.clone()
    changed[row, column] = torch.nextafter(changed[row, column], torch.tensor(9.0))
    blocks = [each.T.contiguous()[None] for each in (weight, changed)]
    assert compact(blocks[0], 96, 96).form.name == form
    assert compact(blocks[1], 96, 96).form.name == "float32"


def test_small_forms_are_smaller() -> None:
    sizes = [narrow(make_weight(128, 256)).bytes for make_weight in FORMS.values()]
    assert sizes == [128 * 256 * 4, 128 * 256 * 2, 128 * 256 * 2, 128 * 256 * 9 // 8, 128 * 256 * 3 // 4]


def test_digits_of_q4_0() -> None:
    linear, x = narrow(symmetric_digits(128, 256)), torch.randn(5, 256)
    assert linear.narrow is not None
    assert linear.narrow.form == "blocks4"
    assert torch.equal(linear.narrow(x), linear._product(torch.cat([x] * 4))[:5])


@pytest.mark.parametrize("short", [False, True])
def test_no_copies_where_memory_is_short(short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", **SIZES)
    size = 4 * sum(weight.numel() for weight in model.parameters())
    monkeypatch.setattr("paceline.targets.compact._free_memory", lambda: size / 2 if short else 2.0 * size)
    target = make_torch_target(model.half().float())
    assert isinstance(target, TorchTarget)
    forms = {
        linear.narrow.form for linear in target.weights.linears if isinstance(linear, PackedLinear) and linear.narrow
    }
    assert forms == {"float32" if short else "float16"}
    assert target.exact


@pytest.mark.parametrize("inputs", [0, 600])
def test_zeros_do_not_hide_the_order_of_sums(inputs: int) -> None:
    """Every order gives the same sums of a first matrix that has nothing beyond its first inputs."""
    pruned, other = torch.randn(64, 1536), torch.randn(64, 1536)
    pruned[:, inputs:] = 0
    linears = [PackedLinear(weight) for weight in (pruned, other)]
    assert make_width_independent(linears)
    x = torch.randn(33, 1536)
    assert torch.equal(linears[1](x[:32]), linears[1](x)[:32])


def test_weights_that_are_no_numbers_stay_with_onednn() -> None:
    weights = torch.randn(2, 64, 64)
    weights[1, 3, 5] = torch.nan
    linears = [PackedLinear(weight) for weight in weights]
    assert make_width_independent(linears)
    assert linears[1].narrow is None


def test_zeros_are_a_form() -> None:
    linear = narrow(torch.zeros(64, 64))
    assert linear.narrow is not None
    assert not linear.narrow(torch.randn(3, 64)).any()


@pytest.mark.parametrize("shape", [(100, 64), (64, 33)])
def test_other_shapes_stay_with_onednn(shape: tuple[int, int]) -> None:
    linear = PackedLinear(torch.randn(shape))
    assert not quicken([linear], linear.probe())
    assert linear.narrow is None


def test_an_order_of_sums_that_is_not_known_is_found() -> None:
    class Fickle(PackedLinear):
        def _product(self, x: Tensor) -> Tensor:
            return super()._product(x) * (1 + 2e-7)

    linear = Fickle(torch.randn(64, 64))
    assert not quicken([linear], linear.probe())


# -- whole layers ------------------------------------------------------------------------------------------------------
FAMILIES = ("llama", "gemma2", "gemma3", "glm4", "gpt_neox-sequential", "mistral-windows", "olmo", "qwen3-windows")


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_at_once_or_one_by_one(family: str) -> None:
    target = make_torch_target(tiny(family, **SIZES))
    assert isinstance(target, TorchTarget)
    assert target.exact
    ids, cache = torch.arange(5)[None], target.new_cache(1, 32)
    with torch.inference_mode():
        target.prefill([7, 8, 9] * 4, cache)
        span = Span(ids, cache.lengths.copy())
        hidden = target.embed(span)
        for start, stop in ((0, target.num_layers), (0, 1), (1, target.num_layers)):
            plan, flows = target._planned(span, cache), [hidden.reshape(5, -1).clone() for _ in range(2)]
            at_once = target.ops.together(plan, flows[0], start, stop, {})
            assert at_once is not None
            last = target._one_by_one(plan, cache, flows[1], start, stop, (), None)
            assert last is not None
            assert torch.equal(flows[0] + at_once, flows[1] + last), (start, stop)
        taps = range(target.num_layers + 1)
        for start in (0, 1):
            left, tapped = target._layers_tapped(hidden, span, cache, start, taps[start:])
            apart, each = super(TorchTarget, target)._layers_tapped(hidden, span, cache, start, taps[start:])
            assert torch.equal(left, apart)
            assert tapped.keys() == each.keys()
            assert all(torch.equal(tapped[tap], each[tap]) for tap in each)
            assert target.ops.goes_whole(5)
            whole = target.forward(span, cache, taps[start:], start, hidden)
            assert torch.equal(whole.logits, target.head(apart))
            assert all(torch.equal(whole.taps[tap], each[tap]) for tap in each)
        left, tapped = target._layers_tapped(hidden, span, cache, 0, ())  # what a tap was before is forgotten
        assert torch.equal(left, super(TorchTarget, target)._layers_tapped(hidden, span, cache, 0, ())[0])
        assert not tapped


def test_models_with_other_layers_go_one_by_one() -> None:
    for family in ("cohere", "mixtral", "granite"):
        target = make_torch_target(tiny(family, **SIZES))
        span, cache = Span(torch.arange(5)[None], np.zeros(1, dtype=np.int64)), target.new_cache(1, 32)
        assert isinstance(target, TorchTarget)
        assert target.ops.together(target._planned(span, cache), torch.zeros(5, 64), 0, 1, {}) is None
        assert not target.ops.goes_whole(5)


def test_other_windows_count_at_once() -> None:
    target = make_torch_target(tiny("mistral-windows", **SIZES))
    assert isinstance(target, TorchTarget)
    cache, found = target.new_cache(1, 32), []
    with torch.inference_mode():
        target.prefill([7, 8, 9] * 4, cache)
        for window in (0, 2, 0):
            target.windows = [window] * target.num_layers
            found.append(target.forward(Span(torch.tensor([[5]]), cache.lengths.copy()), cache).logits)
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("count", [0, 1, 4, 5])
def test_few_rows_of_a_packed_matrix(count: int) -> None:
    weight = torch.randn(80, 48)
    rows, ids = PackedRows.of(PackedLinear(weight), weight), torch.randint(0, 80, (count,))
    assert rows is not None
    assert torch.equal(rows(ids), weight[ids])


def digest() -> str:
    """Of the logits of a pass that all kinds of kernels take part in."""
    shape = {"hidden_size": 192, "intermediate_size": 256, "num_attention_heads": 3, "num_key_value_heads": 1}
    target = make_torch_target(small_llama(**shape, head_dim=64, num_hidden_layers=1, vocab_size=128).float())
    cache = target.new_cache(1, 100)
    cache.store.normal_(generator=torch.Generator().manual_seed(1))
    cache.lengths[:] = 90
    with torch.inference_mode():
        logits = target.forward(Span(torch.tensor([[5, 6]]), cache.lengths.copy()), cache).logits
    return hashlib.sha256(logits.numpy().tobytes()).hexdigest()


def test_kernels_read_from_the_disk_compute_what_fresh_ones_did() -> None:
    """This process has compiled them, in a clean checkout; another one reads them."""
    fresh, places = digest(), Path(os.environ.get("NUMBA_CACHE_DIR") or Path(paceline.__file__).parent)
    kept = {file: file.stat().st_mtime_ns for file in places.rglob("*.nbc")}
    assert any("multiply" in file.name for file in kept), "nothing was kept"
    again = subprocess.run(
        [sys.executable, "-c", "from targets.test_narrow import digest; print(digest())"],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert again.stdout.strip() == fresh
    now = {file: file.stat().st_mtime_ns for file in places.rglob("*.nbc")}
    assert now == kept, "something was compiled again"
