"""Sliding windows on the fast tiers, far smaller than the texts. (Logits and bits: the tests of their families.)"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers import Oracle, hf_greedy, one_thread  # noqa: F401
from paceline.decoding.engine import Engine
from paceline.decoding.request import Request
from paceline.drafting.tree import TokenTree, tree_span
from paceline.errors import ModelError, UnsupportedModel
from paceline.policies.fixed import Fixed
from paceline.targets import tiers
from paceline.targets.costs import _slot_bytes
from paceline.targets.layout import layer_windows
from paceline.targets.native import NativeTarget, available
from paceline.targets.native import start as packed
from paceline.targets.reference import as_target
from paceline.targets.span import Span
from paceline.targets.target import Target
from paceline.targets.tiers import load_target, make_target
from paceline.targets.torch_tier import make_inexact_torch_target, make_torch_target
from targets.test_families import bushy
from tiny import byte_tokenizer
from tiny_families import MIXED, VOCAB, tiny
from told import told

native = pytest.param(NativeTarget, marks=pytest.mark.skipif(not available(), reason="no C++ compiler"), id="native")
FAST = [native, pytest.param(make_torch_target, id="torch"), pytest.param(make_inexact_torch_target, id="inexact")]
Make = Callable[..., Target]
PROMPTS = [[5, 9, 17], list(range(40, 80)), [7, 11, 13] * 4]


@pytest.mark.parametrize("make", FAST)
@pytest.mark.parametrize("variant", ["gemma2", "gemma3", "mistral-windows"])
@torch.inference_mode()
def test_greedy_text_is_that_of_generate(variant: str, make: Make) -> None:
    """One by one and in a ragged batch, with drafts of truths and nonsense, among them wide trees."""
    truths = {tuple(prompt): hf_greedy(tiny(variant), prompt, 30) for prompt in PROMPTS}
    target = make(tiny(variant))
    for groups in ([PROMPTS], [[prompt] for prompt in PROMPTS]):
        for prompts in groups:
            requests = [Request(prompt, limit=30, policy=Fixed(k=6)) for prompt in prompts]
            for _ in Engine(target, Oracle(target, truths)).run(requests, batch=len(prompts)):
                pass
            assert [request.output for request in requests] == [truths[tuple(prompt)] for prompt in prompts]


@pytest.mark.parametrize("make", FAST)
@torch.inference_mode()
def test_ragged_trees(make: Make) -> None:
    """Nodes of many depths and slots, behind texts shorter and longer than the window: each as its path is alone."""
    target, model = make(tiny("gemma3")), tiny("gemma3")
    chain = TokenTree.root(9)
    chain.add_path(list(range(11, 24)), "x")
    trees, contexts = [bushy(), chain, bushy()], [[i % VOCAB for i in range(length)] for length in (4, 30, 135)]
    cache = target.new_cache(len(trees), 160)
    for row, context in enumerate(contexts):
        target.prefill(context, cache.rows(row, row + 1), chunk=33)
    out = target.forward(tree_span(trees, cache.lengths, target.device), cache)
    for row, (tree, context) in enumerate(zip(trees, contexts, strict=True)):
        logits = out.row(row, len(tree)).logits
        for node in range(len(tree)):
            ids = [*context, *(tree.tokens[step] for step in tree.path(node))]
            want = model(torch.tensor([ids])).logits[0, -1]
            torch.testing.assert_close(logits[node], want, rtol=0, atol=2e-5 * float(want.abs().max()))


@pytest.mark.parametrize("make", FAST)
@pytest.mark.parametrize("behind", [20, 133])
@torch.inference_mode()
def test_what_lies_before_the_window_is_not_read(make: Make, behind: int) -> None:
    """Not by one token, nor by a tree, whose nodes see 9 tokens back from their own positions."""
    target = make(tiny("mistral-windows"))
    cache = target.new_cache(1, 150)
    target.prefill((torch.arange(behind) % VOCAB).tolist(), cache)
    single = Span(torch.tensor([[5]]), cache.lengths.copy())
    for span in (single, tree_span([bushy()], cache.lengths, target.device)):
        want = target.forward(span, cache).logits
        kept = cache.store[..., : behind - 8, :].clone()
        cache.store[..., : behind - 8, :] = torch.nan
        assert torch.equal(target.forward(span, cache).logits, want)
        cache.store[..., : behind - 8, :] = kept


@pytest.mark.parametrize("tier", [pytest.param("native", marks=native.marks), "torch"])
def test_other_windows_are_found_when_a_model_is_loaded(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof reads with small ones, and gives the model's own back."""
    assert make_target(tiny("gemma2"), tier=tier).windows == [9, 0, 9]
    monkeypatch.setattr(tiers, "layer_windows", lambda *_: [4, 4, 4])
    with told(ModelError, f"the {tier} tier gives other logits"):
        make_target(tiny("gemma2"), tier=tier)


def test_costs_count_what_grows_with_the_text() -> None:
    """The keys and values of one layer of three: 2 heads of 14 numbers."""
    assert _slot_bytes(make_target(tiny("gemma2"), tier="torch")) == 2 * 2 * 14 * 4


def test_windows_that_hold_the_whole_context_are_none() -> None:
    assert make_target(tiny("mistral-windows", sliding_window=500), tier="torch").windows == [0, 0, 0]


@pytest.mark.skipif(not available(), reason="no C++ compiler")
@torch.inference_mode()
def test_packed_weights_know_windows_and_angles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "folder", lambda: tmp_path / "packed")
    folder, ids = tmp_path / "model", torch.randint(0, VOCAB, (1, 30))
    tiny("gemma3").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    targets = [load_target(str(folder), tier="native") for _ in range(2)]
    assert isinstance(targets[1].model, packed.NoModel)
    caches = [target.new_cache(1, 30) for target in targets]
    passes = [
        target.forward(Span(ids, cache.lengths.copy()), cache) for target, cache in zip(targets, caches, strict=True)
    ]
    assert torch.equal(passes[0].logits, passes[1].logits)
    assert targets[1].windows == [9, 0, 9]


@pytest.mark.parametrize("make", FAST[:2])
def test_refused(make: Make) -> None:
    ropes = {name: {"rope_type": "default", "rope_theta": 50.0} for name in MIXED["layer_types"]}
    ropes["full_attention"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 50.0}
    with told(UnsupportedModel, "rotary embeddings of type dynamic"):
        make(tiny("gemma3", rope_parameters=ropes))
    model = tiny("mistral-windows")
    model.config.layer_types, model.config.attention_chunk_size = ["chunked_attention"] * 3, 9
    assert layer_windows(model, 160) is None
    with told(UnsupportedModel, "that see chunks"):
        make(model)


@torch.inference_mode()
def test_float64_and_capped_scores() -> None:
    """Torch's own operations, as on a GPU."""
    ids = torch.randint(0, VOCAB, (1, 40))
    for variant in ("gemma2", "gemma3", "olmo3"):
        want = tiny(variant).double()(ids).logits
        target = make_torch_target(tiny(variant).double())
        cache = target.new_cache(1, 40)
        target.prefill(ids[0, :30].tolist(), cache, chunk=12)
        logits = target.forward(Span(ids[:, 30:], cache.lengths.copy()), cache).logits
        torch.testing.assert_close(logits, want[:, 30:], rtol=0, atol=3e-6 * float(want.abs().max()))


def test_reference_runs_them_layer_by_layer() -> None:
    assert all(as_target(tiny(variant)).has_blocks for variant in ("cohere2", "gemma3", "olmo3"))
