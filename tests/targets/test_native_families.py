"""Every family of the table on the native tier: transformers' logits, and the same bits however they are computed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from paceline.drafting.tree import tree_span
from paceline.errors import UnsupportedModel
from paceline.targets.families import FAMILIES
from paceline.targets.native import NativeTarget, available, build
from paceline.targets.reference import as_target
from paceline.targets.span import Span
from paceline.targets.target import Target
from targets.test_families import bushy
from tiny_families import CONTEXT, VARIANTS, VOCAB, tiny
from told import told

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler with OpenMP")

LENGTH = 140  # more than one of attention's chunks


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    threads = torch.get_num_threads()
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest) -> tuple[NativeTarget, Target]:
    return NativeTarget(tiny(request.param)), as_target(tiny(request.param))


def random_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


IDS = random_ids(LENGTH)


def logits_of(target: Target, widths: list[int]) -> Tensor:
    """Of IDS `[tokens, vocab]`, in passes of these widths and a last one."""
    cache, parts, at = target.new_cache(1, LENGTH), [], 0
    for width in [*widths, LENGTH]:
        if ids := IDS[at : at + width].tolist():
            parts.append(target.forward(Span(torch.tensor([ids]), cache.lengths.copy()), cache).logits[0])
            cache.commit([range(len(ids))])
        at += width
    return torch.cat(parts)


def test_all_families_are_here() -> None:
    assert {tiny(variant).config.model_type for variant in VARIANTS} | {"mistral", "qwen2", "qwen3"} == {*FAMILIES}


def test_is_hugging_face(pair: tuple[NativeTarget, Target]) -> None:
    native, reference = pair
    want = reference.model(IDS[None]).logits[0]
    torch.testing.assert_close(logits_of(native, []), want, rtol=0, atol=2e-5 * float(want.abs().max()))


def test_block_view(pair: tuple[NativeTarget, Target]) -> None:
    """Embeddings, taps, features, skipped sublayers, and what they leave in the cache, over rows of several lengths."""
    native, reference = pair
    skip, starts = {(0, "mlp"), (1, "attention"), (2, "attention"), (2, "mlp")}, (5, 0, 30)
    results = []
    for target in (native, reference):
        cache = target.new_cache(3, 40)
        for row, length in enumerate(starts):
            target.prefill(IDS[:length].tolist(), cache.rows(row, row + 1))
        span = Span(random_ids(3, 4), cache.lengths.copy())
        out = target.forward(span, cache, taps=(0, 2, 3))
        # Keys may lie in another order inside a head, and those of windows in rings.
        values = [] if reference.layout else [cache.store[:, 1].clone()]
        left_out = target.layers(out.taps[0], span, cache, 0, 3, skip)
        results.append([*out.taps.values(), out.logits, *values, left_out, target.features(left_out)])
    scale = float(results[1][0].abs().max())
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * max(1.0, scale))


def test_any_width_threads_and_instruction_set_give_the_same_bits(pair: tuple[NativeTarget, Target]) -> None:
    native, _ = pair
    before, behind, slow = build.instruction_set(), 124, (1, 4, 16)
    torch.set_num_threads(1)
    want = logits_of(native, [behind, *[1] * (LENGTH - behind)])
    try:
        for name in build.runnable():
            build.choose(name)
            torch.set_num_threads(2)
            cache = native.new_cache(1, LENGTH)
            native.prefill(IDS[:behind].tolist(), cache, chunk=53)
            for width in slow if name == "portable" else range(1, LENGTH - behind + 1):
                span = Span(IDS[None, behind : behind + width], cache.lengths.copy())
                assert torch.equal(native.forward(span, cache).logits[0], want[behind : behind + width])
    finally:
        build.choose(before)


def test_a_path_through_a_tree_is_a_chain(pair: tuple[NativeTarget, Target]) -> None:
    native, _ = pair
    tree, context = bushy(), IDS[:125].tolist()
    cache, alone = native.new_cache(1, CONTEXT), native.new_cache(1, CONTEXT)
    native.prefill(context, cache)
    native.prefill(context, alone)
    logits = native.forward(tree_span([tree], cache.lengths, native.device), cache).logits[0]
    for node in range(len(tree)):
        path = torch.tensor([[tree.tokens[n] for n in tree.path(node)]])
        assert torch.equal(logits[node], native.forward(Span(path, alone.lengths.copy()), alone).logits[0, -1])


def test_a_token_reads_the_experts_it_chooses() -> None:
    target = NativeTarget(tiny("mixtral"))  # two of five, of two matrices each, in three layers
    unread = len(target.native.matrices) - len(target.native.read)
    assert unread == 3 * 3 * 2
    attention, expert = 60 * (60 + 40) + 60 * 60, 60 * (2 * 104) + 100 * 60
    assert target.weight_count == 3 * (attention + 5 * 60 + 2 * expert) + VOCAB * 60
    assert target.weight_bytes > 4 * target.weight_count  # rows are filled up to whole blocks


def test_of_equal_experts_the_first_are_chosen() -> None:
    """A router of zeros: the experts that count are 0 and 1, each by half."""

    def with_zeros() -> Target:
        model = tiny("mixtral")
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()
        return NativeTarget(model)

    def with_two() -> Target:
        model = tiny("mixtral", num_local_experts=2)
        for layer, whole in zip(model.model.layers, tiny("mixtral").model.layers, strict=True):
            layer.load_state_dict(
                {
                    name: weight[:2] if ".experts." in name else weight
                    for name, weight in whole.state_dict().items()
                    if "gate.weight" not in name
                },
                strict=False,
            )
            layer.mlp.gate.weight.zero_()
        for part in ("embed_tokens", "norm"):
            getattr(model.model, part).load_state_dict(getattr(tiny("mixtral").model, part).state_dict())
        model.lm_head.load_state_dict(tiny("mixtral").lm_head.state_dict())
        return NativeTarget(model)

    assert torch.equal(logits_of(with_zeros(), [3]), logits_of(with_two(), [3]))


def test_experts_with_another_activation() -> None:
    want = tiny("mixtral", hidden_act="gelu_new")(IDS[None]).logits[0]
    got = logits_of(NativeTarget(tiny("mixtral", hidden_act="gelu_new")), [])
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5 * float(want.abs().max()))


def test_what_a_description_does_not_cover() -> None:
    for variant, fields, words in (
        ("olmo", {"clip_qkv": 0.5}, "clip_qkv=0.5"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("stablelm", {"qk_layernorm": True}, r"weights called self_attn.q_layernorm.norms.0.weight"),
        ("starcoder2", {"hidden_act": "relu6"}, "activation relu6"),
        ("glm", {"head_dim": 258}, "head size 258"),
    ):
        with told(UnsupportedModel, words):
            NativeTarget(tiny(variant, **fields))


def test_a_layer_that_has_changed_is_found_where_layers_differ() -> None:
    model = tiny("smollm3")
    model.model.layers[1].self_attn.use_rope = 1
    with told(UnsupportedModel, r"layers\.1"):
        NativeTarget(model)
