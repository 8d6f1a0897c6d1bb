"""Models whose layers differ: windows, chunks, latent attention, shared keys and values. The windows are far smaller
than the texts, and logits are compared with Hugging Face's own, as greedy text would hide what is a little wrong."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from helpers import Oracle, hf_greedy, one_thread, perturbed  # noqa: F401
from paceline.decoding.engine import Engine
from paceline.decoding.request import Request
from paceline.drafters.draft_model import DraftModel
from paceline.drafting.tree import TokenTree, tree_span
from paceline.errors import UnsupportedModel
from paceline.policies.fixed import Fixed
from paceline.targets.cache import KVCache
from paceline.targets.costs import _slot_bytes
from paceline.targets.costs import measure_costs as measured  # not the suite's steady ones
from paceline.targets.layered import REGION, LayeredCache, LayerShape
from paceline.targets.layout import read_layout, sees_everything
from paceline.targets.reach import Reach
from paceline.targets.reference import BlockTarget, as_target
from paceline.targets.span import Span
from paceline.targets.target import Target
from paceline.targets.tiers import make_target
from targets.test_families import bushy, close, random_ids, reference

VOCAB = 257
WINDOW = 8
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWED = {**SIZES, "head_dim": 8, "sliding_window": WINDOW}
LATENT = {**SIZES, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
LATENT |= {"qk_nope_head_dim": 8, "v_head_dim": 12}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
MIXED = ["sliding_attention", "full_attention"]
SHARING = {**WINDOWED, "num_hidden_layers": 6, "num_kv_shared_layers": 2, "layer_types": MIXED * 3}
PER_LAYER = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}

BLOCKS = {
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, WINDOWED),
    "qwen2": (
        hf.Qwen2ForCausalLM,
        hf.Qwen2Config,
        {**SIZES, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3": (
        hf.Qwen3ForCausalLM,
        hf.Qwen3Config,
        {**WINDOWED, "use_sliding_window": True, "layer_types": MIXED * 2},
    ),
}
WHOLE = {
    "phi3": (hf.Phi3ForCausalLM, hf.Phi3Config, WINDOWED),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config, WINDOWED),
    "gemma3": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, {**WINDOWED, "layer_types": MIXED * 2}),
    "gemma3n shares keys": (
        hf.Gemma3nForCausalLM,
        hf.Gemma3nTextConfig,
        {**SHARING, **PER_LAYER, "activation_sparsity_pattern": [0.0] * 6, "laurel_rank": 4},
    ),
    "gemma4 shares keys": (hf.Gemma4ForCausalLM, hf.Gemma4TextConfig, {**SHARING, **PER_LAYER, "global_head_dim": 16}),
    "gpt-oss": (hf.GptOssForCausalLM, hf.GptOssConfig, {**WINDOWED, "num_local_experts": 4}),
    "cohere2": (hf.Cohere2ForCausalLM, hf.Cohere2Config, WINDOWED),
    "llama4 in chunks": (
        hf.Llama4ForCausalLM,
        hf.Llama4TextConfig,
        {**SIZES, "head_dim": 8, "attention_chunk_size": WINDOW, "intermediate_size_mlp": 48, "num_local_experts": 2}
        | {"no_rope_layer_interval": 2, "floor_scale": 4, "attn_scale": 0.5},
    ),
    "deepseek v2": (hf.DeepseekV2ForCausalLM, hf.DeepseekV2Config, {**LATENT, **EXPERTS}),
    "deepseek v3": (
        hf.DeepseekV3ForCausalLM,
        hf.DeepseekV3Config,
        {**LATENT, **EXPERTS, "n_group": 1, "topk_group": 1},
    ),
    "mimo v2": (
        hf.MiMoV2FlashForCausalLM,
        hf.MiMoV2FlashConfig,
        {**WINDOWED, **EXPERTS, "v_head_dim": 12, "n_group": 1, "topk_group": 1},
    ),
}


def make(name: str, attention: str | None = None, **more: object) -> hf.PreTrainedModel:
    model, config, fields = (BLOCKS | WHOLE)[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = model._from_config(
            config(**{**fields, **more}), attn_implementation=attention, experts_implementation="eager"
        )
        for weight in made.parameters():
            spread = 0.1 if weight.dim() == 1 else 0.15
            weight.data += torch.randn_like(weight) * spread
    return made.double().eval()


@pytest.fixture(scope="module", params=[*BLOCKS, *WHOLE])
def target(request: pytest.FixtureRequest) -> Target:
    made = as_target(make(request.param))
    assert isinstance(made, BlockTarget if request.param in BLOCKS else Target)
    assert made.layout
    return made


@pytest.mark.parametrize("chunk", [7, 45])
@torch.inference_mode()
def test_prompt_then_chains(target: Target, chunk: int) -> None:
    """Pieces of a prompt narrower and wider than what a window's layer keeps; then single tokens, and drafts."""
    ids = random_ids(64)
    want = reference(target, ids.tolist())
    cache = target.new_cache(1, 70)
    target.prefill(ids[:50].tolist(), cache, chunk=chunk)
    for first, stop, kept in ((50, 51, 1), (51, 52, 1), (52, 58, 2), (54, 64, 1)):
        logits = target.forward(Span(ids[None, first:stop], cache.lengths.copy()), cache).logits
        close(logits[0], want[first:stop])
        cache.commit([range(kept)])


@torch.inference_mode()
def test_ragged_trees(target: Target) -> None:
    """Trees with wrong siblings, a chain and a lone root, behind texts shorter and longer than the window."""
    chain, root = TokenTree.root(9), TokenTree.root(10)
    chain.add_path([11, 12, 13], "x")
    trees = [bushy(), root, chain, bushy()]
    contexts = [random_ids(n, seed=n).tolist() for n in (5, 17, 0, 38)]
    cache = target.new_cache(len(trees), 70)
    for row, context in enumerate(contexts):
        target.prefill(context, cache.rows(row, row + 1))
    for _ in range(2):
        out = target.forward(tree_span(trees, cache.lengths, target.device), cache)
        for row, tree in enumerate(trees):
            logits = out.row(row, len(tree)).logits
            for node in range(len(tree)):
                path = tree.path(node)
                close(logits[node], reference(target, contexts[row] + [tree.tokens[n] for n in path])[-1])
        paths = [[0, 2, 4, 8], [0], [0, 1, 2], [0]]
        cache.commit(paths)
        for context, tree, path in zip(contexts, trees, paths, strict=True):
            context += [tree.tokens[node] for node in path]


def test_greedy_text(target: Target) -> None:
    """Through the engine: rows that come and go, trees of truths and wrong siblings."""
    prompts = [random_ids(n, seed=n).tolist() for n in (3, 20, 41)]
    new = 16
    truths = [hf_greedy(target.model, prompt, new) for prompt in prompts]
    drafter = Oracle(target, dict(zip(map(tuple, prompts), truths, strict=True)))
    requests = [Request(prompt, limit=new, policy=Fixed(k=5)) for prompt in prompts]
    for _ in Engine(target, drafter).run(requests, batch=2):
        pass
    assert [request.output for request in requests] == truths
    assert sum(request.stats.accepted for request in requests) > 10


@torch.inference_mode()
def test_blocks_one_by_one() -> None:
    """Each layer gets the mask of its kind, whichever range of layers runs."""
    target = as_target(make("qwen3", "eager"))
    ids = random_ids(1, 20)
    cache = target.new_cache(1, 20)
    target.prefill(ids[0, :15].tolist(), cache)
    span = Span(ids[:, 15:], cache.lengths.copy())
    hidden = target.layers(target.embed(span), span, cache, 0, 1)
    hidden = target.layers(hidden, span, cache, 1, target.num_layers)
    close(target.head(hidden)[0], reference(target, ids[0].tolist())[15:])


def test_a_draft_model_with_windows() -> None:
    """What it drafted is taken back, again and again, without a loss to its windows."""
    target = as_target(make("gemma2"))
    drafter = DraftModel(target, model=as_target(perturbed(make("mistral"), 0.2)))
    prompt = random_ids(30).tolist()
    truth = hf_greedy(target.model, prompt, 40)
    same = DraftModel(target, model=as_target(make("gemma2")))
    for made, share in ((drafter, 0.0), (same, 1.0)):
        request = Request(prompt, limit=40, policy=Fixed(k=6))
        for _ in Engine(target, made).run([request]):
            pass
        assert request.output == truth
        assert request.stats.accepted >= share * sum(round.drafted for round in request.stats.rounds[:-1])


def test_a_window_as_long_as_the_context_is_none() -> None:
    assert not as_target(make("mistral", sliding_window=256)).layout
    assert as_target(make("gemma2", sliding_window=256)).cache_shape().kv_heads == 2


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "phi3", "gemma2", "gemma3", "cohere2", "mistral"])
def test_faster_tiers_take_windows(name: str) -> None:
    assert make_target(make(name).float(), tier="auto").exact
    assert make_target(make(name).float(), tier="torch").windows.count(WINDOW) > 0


class Odd:
    """A model whose own cache has these layers."""

    device = torch.device("cpu")

    def __init__(self, layers: list[object], names: list[str]) -> None:
        self.layers, self.config = layers, SimpleNamespace(model_type="odd", layer_types=names, sliding_window=8)
        self.config.get_text_config = lambda **_: self.config
        self.config.per_layer_config = [self.config] * len(names)

    def forward(self, ids: torch.Tensor) -> None: ...

    def __call__(self, ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(past_key_values=SimpleNamespace(layers=self.layers))


@pytest.mark.parametrize(
    ("layers", "names", "message"),
    [
        ([DynamicIndexedLayer()], ["indexed_attention"], "that keep a DynamicIndexedLayer"),
        ([DynamicLayer()], ["odd_attention"], "odd attention layers"),
        ([DynamicSlidingWindowLayer(size) for size in (4, 8)], ["sliding_attention"] * 2, "windows of several sizes"),
    ],
)
def test_other_layers_are_refused(layers: list[DynamicLayer], names: list[str], message: str) -> None:
    for layer in layers:
        layer.update(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4))
    with pytest.raises(UnsupportedModel, match=message):
        read_layout(Odd(layers, names), 100)
    assert not sees_everything(Odd(layers, names), 100)


def test_costs_count_what_grows_with_the_text() -> None:
    """The keys and values of layers without a window: 2 of 4 here, 2 heads of 8 numbers."""
    assert _slot_bytes(as_target(make("gemma2"))) == 2 * 2 * 2 * 8 * 8
    assert _slot_bytes(as_target(make("mistral"))) == 1
    costs = measured(as_target(make("phi3").float()))
    assert all(costs(width) > 0 for width in (1, 8))


# -- the cache -----------------------------------------------------------------------------------------------------

FULL, SLIDING, CHUNKED = Reach(), Reach("sliding_attention", WINDOW), Reach("chunked_attention", WINDOW, True)


def cache_of(batch: int, capacity: int, *reaches: Reach) -> LayeredCache:
    layout = {index: LayerShape(reach, (1, 1), (1, 2)) for index, reach in enumerate(reaches)}
    return LayeredCache.of(layout, batch, capacity, torch.float64, torch.device("cpu"))


def test_memory_does_not_grow_with_the_text() -> None:
    """A layer with a window keeps it, and the draft region."""

    def numbers(capacity: int, reach: Reach) -> int:
        return sum(part.numel() for part in cache_of(2, capacity, reach).tensors)

    assert numbers(256, SLIDING) == numbers(32768, SLIDING) == 2 * 3 * (WINDOW - 1 + REGION)
    assert numbers(32768, FULL) == 2 * 3 * 32768
    assert numbers(16, SLIDING) == 2 * 3 * 16, "a text shorter than the window and a draft"


def test_memory_of_a_model_shaped_like_gemma_3_1b() -> None:
    """26 layers, 22 of them with windows of 512, one head of 256 numbers, bfloat16, 32,768 tokens."""

    def megabytes(window: int | None) -> float:
        reaches = [FULL if index % 6 == 5 else Reach("sliding_attention", window) for index in range(26)]
        layout = {index: LayerShape(reach, (1, 256), (1, 256)) for index, reach in enumerate(reaches)}
        cache = LayeredCache.of(layout, 1, 32768, torch.bfloat16, torch.device("meta"))
        return sum(part.nbytes for part in cache.tensors) / 1e6

    assert round(megabytes(512)) == 146
    assert round(megabytes(None)) == 872


class Text:
    """Rows of tokens, each with an id of its own, and what the cache should show of them."""

    def __init__(self, cache: KVCache) -> None:
        self.cache, self.rows, self.ids = cache, [[] for _ in range(cache.batch)], iter(range(1, 100000))

    def write(self, span: Span, rows: slice = slice(None)) -> Iterator[tuple[int, int, list[float]]]:
        """Write an id for each node; yields row, node and the ids it sees, for each layer."""
        new = [[next(self.ids) for _ in range(span.width)] for _ in range(span.batch)]
        self.drafted = new
        keys = torch.tensor(new, dtype=torch.float64)[:, None, :, None]
        cache = self.cache.rows(rows.start or 0, self.cache.batch if rows.stop is None else rows.stop)
        masks = cache.masks(span, torch.float64)
        for layer, reach in enumerate((FULL, SLIDING, CHUNKED)):
            shown, values = cache.write(layer, span, keys, keys.expand(-1, -1, -1, 2))
            assert torch.equal(shown.expand_as(values), values)
            seen = masks[reach.name] == 0
            for row in range(span.batch):
                for node in range(span.width):
                    yield row, node, reach, sorted(shown[row, 0, seen[row, 0, node], 0].tolist())


def within(reach: Reach, path: list[int]) -> list[int]:
    """Of a text's ids, those that its last token sees."""
    last = len(path) - 1
    first = {FULL: 0, SLIDING: max(0, last - WINDOW + 1), CHUNKED: last - last % WINDOW}[reach]
    return sorted(path[first:])


@st.composite
def trees(draw: st.DrawFn, most: int) -> TokenTree:
    tree = TokenTree.root(0)
    for node in range(draw(st.integers(0, most))):
        tree.add(1, draw(st.integers(max(0, node - 3), node)), "x")
    return tree


@settings(max_examples=40)
@given(st.data())
def test_what_is_seen_is_within_reach(data: st.DataObject) -> None:
    """Prompts in pieces, rounds of ragged trees of which any path is kept, rows that move."""
    cache = cache_of(3, 400, FULL, SLIDING, CHUNKED)
    text = Text(cache)
    for row in range(3):
        for width in data.draw(st.lists(st.integers(1, 60), max_size=2)):
            span = Span(torch.zeros(1, width, dtype=torch.long), cache.lengths[row : row + 1].copy(), final=True)
            seen = list(text.write(span, slice(row, row + 1)))
            before = list(text.rows[row])
            for _, node, reach, ids in seen:
                assert ids == within(reach, before + text.drafted[0][: node + 1])
            text.rows[row] += text.drafted[0]
            cache.lengths[row] += width
    for _ in range(data.draw(st.integers(1, 4))):
        some = [data.draw(trees(40)) for _ in range(3)]
        for row, node, reach, ids in text.write(tree_span(some, cache.lengths, torch.device("cpu"))):
            if node < len(some[row]):
                path = [text.drafted[row][at] for at in some[row].path(node)]
                assert ids == within(reach, text.rows[row] + path)
        paths = [tree.path(data.draw(st.integers(0, tree.drafted))) for tree in some]
        cache.commit(paths)
        for row, path in enumerate(paths):
            text.rows[row] += [text.drafted[row][node] for node in path]
        if data.draw(st.booleans()):
            cache.move(2, 0)
            text.rows[0] = list(text.rows[2])
    assert cache.lengths.tolist() == [len(row) for row in text.rows]
