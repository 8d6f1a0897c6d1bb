"""Each model family through our cache, masks and positions, against Hugging Face's own forward."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

from helpers import one_thread  # noqa: F401
from paceline.drafting.tree import TokenTree, tree_span
from paceline.targets.families import run_sublayers
from paceline.targets.reference import BlockTarget, as_target
from paceline.targets.rope import rotaries
from paceline.targets.span import Span
from paceline.targets.target import Target
from paceline.targets.whole import WholeTarget
from tiny_families import VARIANTS, tiny

VOCAB, CONTEXT = 64, 64
COMMON = {"vocab_size": VOCAB, "initializer_range": 0.3}
SIZES = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GQA = {**SIZES, "num_key_value_heads": 2}
GPT2 = {**COMMON, "n_positions": CONTEXT, "n_embd": 32, "n_layer": 3, "n_head": 4, "bos_token_id": None}
OPT = {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3, "pad_token_id": 1}
llama3_rope = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

BLOCKS: dict[str, tuple[type, type, dict[str, object]]] = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, SIZES),
    "llama-gqa": (hf.LlamaForCausalLM, hf.LlamaConfig, GQA),
    "llama-head-dim": (hf.LlamaForCausalLM, hf.LlamaConfig, {**GQA, "head_dim": 12}),
    "llama-bias": (hf.LlamaForCausalLM, hf.LlamaConfig, {**GQA, "attention_bias": True, "mlp_bias": True}),
    "llama-tied": (hf.LlamaForCausalLM, hf.LlamaConfig, {**GQA, "tie_word_embeddings": True}),
    "llama-3-rope": (hf.LlamaForCausalLM, hf.LlamaConfig, {**GQA, "rope_parameters": llama3_rope}),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, {**GQA, "sliding_window": None}),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, GQA),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {**GQA, "head_dim": 12}),
    "gpt-neox": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, {**SIZES, "rotary_pct": 0.5}),
    "gpt-neox-sequential": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, {**SIZES, "use_parallel_residual": False}),
}
WHOLE: dict[str, tuple[type, type, dict[str, object]]] = {
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config, GPT2),
    "opt": (hf.OPTForCausalLM, hf.OPTConfig, OPT),
    "persimmon": (hf.PersimmonForCausalLM, hf.PersimmonConfig, SIZES),
}
MORE = {variant: VARIANTS[variant] for variant in VARIANTS if variant not in ("llama", "gpt_neox")}


def make(family: str, attention: str = "sdpa") -> hf.PreTrainedModel:
    if family in MORE:
        return tiny(family, attention, vocab_size=VOCAB, max_position_embeddings=CONTEXT).double()
    model, config, fields = (BLOCKS | WHOLE)[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = model._from_config(config(**fields), attn_implementation=attention)
        for weight in made.parameters():  # biases and norms start as 0 and 1, where a mistake cannot be seen
            if weight.dim() == 1:
                torch.nn.init.normal_(weight, mean=weight.mean().item(), std=0.3)
    return made.double().eval()


@pytest.fixture(scope="module", params=[*BLOCKS, *WHOLE])
def target(request: pytest.FixtureRequest) -> Target:
    made = as_target(make(request.param))
    assert isinstance(made, BlockTarget if request.param in BLOCKS else WholeTarget)
    return made


#: Norms and rotary angles of some families are float32 in a float64 model: a last bit there is a millionth here.
close: Callable[..., None] = lambda got, want: torch.testing.assert_close(got, want, rtol=0, atol=3e-6)  # noqa: E731


def random_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def reference(target: Target, ids: list[int]) -> Tensor:
    """Hugging Face's logits `[tokens, vocab]`, without a cache."""
    return target.model(torch.tensor([ids]), use_cache=False).logits[0]


@torch.inference_mode()
def test_single_pass(target: Target) -> None:
    ids = random_ids(1, 20)
    cache = target.new_cache(1, 20)
    close(target.forward(Span(ids, cache.lengths), cache).logits[0], reference(target, ids[0].tolist()))


@pytest.mark.parametrize("chunk", [3, 7, 512])
@torch.inference_mode()
def test_prefill_then_single_steps(target: Target, chunk: int) -> None:
    ids = random_ids(20)
    want = reference(target, ids.tolist())
    cache = target.new_cache(1, 20)
    target.prefill(ids[:14].tolist(), cache, chunk=chunk)
    assert cache.lengths.tolist() == [14]
    for at in range(14, 20):
        logits = target.forward(Span(ids[None, at : at + 1], cache.lengths.copy()), cache).logits
        close(logits[0, 0], want[at])
        cache.commit([[0]])


def bushy() -> TokenTree:
    """Branches of different depths, siblings with one token, a node order that is not depth first."""
    tree = TokenTree.root(7)
    for token, parent in [(1, 0), (2, 0), (3, 1), (4, 2), (1, 0), (5, 3), (6, 4), (6, 4), (8, 5)]:
        tree.add(token, parent, "x")
    return tree


@torch.inference_mode()
def test_ragged_trees(target: Target) -> None:
    """A batch of trees, a chain and a lone root behind contexts of different lengths; then a commit, then more."""
    chain, root = TokenTree.root(9), TokenTree.root(10)
    chain.add_path([11, 12, 13], "x")
    trees = [bushy(), root, chain, bushy()]
    contexts = [random_ids(n, seed=n).tolist() for n in (5, 17, 0, 30)]
    cache = target.new_cache(len(trees), 50)
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


@torch.inference_mode()
def test_level_batch_of_single_steps(target: Target) -> None:
    """Rows of one length need no mask: another way through attention."""
    ids = random_ids(3, 9)
    cache = target.new_cache(3, 12)
    for row in range(3):
        target.prefill(ids[row, :8].tolist(), cache.rows(row, row + 1))
    logits = target.forward(Span(ids[:, 8:], cache.lengths.copy()), cache).logits
    for row in range(3):
        close(logits[row, 0], reference(target, ids[row].tolist())[-1])


@torch.inference_mode()
def test_draft_region_in_pieces(target: Target) -> None:
    """A drafter on the target's own cache fills the draft region slot by slot, seeing what it wrote before."""
    ids = random_ids(2, 12)
    cache = target.new_cache(2, 16)
    contexts = [ids[0, :6].tolist(), ids[1, :8].tolist()]
    for row, context in enumerate(contexts):
        target.prefill(context, cache.rows(row, row + 1))
    for offset in range(4):
        step = torch.stack([ids[0, 6 + offset], ids[1, 8 + offset]])[:, None]
        logits = target.forward(Span(step, cache.lengths.copy(), offset=offset), cache).logits
        close(logits[0, 0], reference(target, ids[0, : 7 + offset].tolist())[-1])
        close(logits[1, 0], reference(target, ids[1, : 9 + offset].tolist())[-1])


@torch.inference_mode()
def test_taps(target: Target) -> None:
    """Tap i is what enters layer i, in prefill and in a pass."""
    ids = random_ids(1, 10)
    want = target.model(ids, output_hidden_states=True).hidden_states
    taps = range(target.num_layers)
    cache = target.new_cache(1, 10)
    got = target.forward(Span(ids, cache.lengths.copy()), cache, taps).taps
    prefilled = target.prefill(ids[0].tolist(), target.new_cache(1, 10), taps, chunk=4)
    for tap in taps:
        close(got[tap], want[tap])
        close(prefilled[tap], want[tap][0])
    assert target.prefill([], target.new_cache(1, 10), [1])[1].shape == (0, want[1].shape[-1])


@pytest.mark.parametrize("family", MORE)
def test_the_families_of_the_table(family: str) -> None:
    target = as_target(make(family))
    assert isinstance(target, BlockTarget)
    test_single_pass(target)
    test_ragged_trees(target)
    test_taps(target)


class TestBlocks:
    @pytest.mark.parametrize("family", BLOCKS)
    @torch.inference_mode()
    def test_blocks_one_by_one(self, family: str) -> None:
        target = as_target(make(family))
        ids = random_ids(1, 10)
        cache = target.new_cache(1, 10)
        span = Span(ids, cache.lengths.copy())
        hidden = target.embed(span)
        hidden = target.layers(hidden, span, cache, 0, 1)
        hidden = target.layers(hidden, span, cache, 1, target.num_layers)
        close(target.head(hidden)[0], reference(target, ids[0].tolist()))

    @pytest.mark.parametrize("family", BLOCKS)
    @torch.inference_mode()
    def test_last_tap_enters_the_head(self, family: str) -> None:
        target = as_target(make(family))
        cache = target.new_cache(1, 10)
        span = Span(random_ids(1, 10), cache.lengths.copy())
        out = target.forward(span, cache, [target.num_layers])
        close(target.head(out.taps[target.num_layers]), out.logits)

    @pytest.mark.parametrize("family", BLOCKS)
    @torch.inference_mode()
    def test_eager_attention(self, family: str) -> None:
        """Unlike SDPA it sees everything when it gets no mask."""
        target = as_target(make(family, "eager"))
        ids = random_ids(10).tolist()
        cache = target.new_cache(1, 10)
        target.prefill(ids[:8], cache)
        close(
            target.forward(Span(torch.tensor([ids[8:]]), cache.lengths.copy()), cache).logits[0],
            reference(target, ids)[8:],
        )

    @pytest.mark.parametrize("family", [*BLOCKS, *MORE])
    @torch.inference_mode()
    def test_sublayers_apart(self, family: str) -> None:
        """With both sublayers it is the layer; with neither the identity; with one, the other's part is missing."""
        target = as_target(make(family))
        assert isinstance(target, BlockTarget)
        ids = random_ids(1, 6)
        hidden = target.embed(Span(ids, np.array([0])))
        positions = torch.arange(6)[None]
        arguments = {
            "attention_mask": Span(ids, np.array([0])).mask(torch.float64),
            "position_embeddings": next(iter(rotaries(target.decoder.rotary_emb).values()))(hidden, positions),
        }
        layer = target.decoder.layers[1]
        whole = layer(hidden, **arguments)

        def parts(attention: bool, mlp: bool) -> Tensor:
            return run_sublayers(target.family, layer, hidden, attention, mlp, **arguments)

        close(parts(True, True), whole)
        assert torch.equal(parts(False, False), hidden)
        attended = parts(True, False)
        if target.family.is_parallel(target.config):
            close(attended + parts(False, True) - hidden, whole)
        else:
            close(run_sublayers(target.family, layer, attended, False, True, **arguments), whole)

    @pytest.mark.parametrize("family", [*BLOCKS, *MORE])
    @torch.inference_mode()
    def test_skipping(self, family: str) -> None:
        """`layers(skip=...)` is those layers without those sublayers; nothing is written for a skipped attention."""
        target = as_target(make(family))
        ids = random_ids(1, 6)
        cache, skipping = target.new_cache(1, 6), target.new_cache(1, 6)
        span = Span(ids, cache.lengths.copy())
        hidden = target.embed(span)
        whole = [(1, "attention"), (1, "mlp")]
        got = target.layers(hidden, span, skipping, 0, 3, whole)
        want = target.layers(target.layers(hidden, span, cache, 0, 1), span, cache, 2, 3)
        close(got, want)
        got, want = (one.tensors if target.layout else [*one.store.flatten(0, 1)] for one in (skipping, cache))
        assert all(map(torch.equal, got, want))
        assert [bool(part.any()) for part in got] == [True, True, False, False, True, True]
