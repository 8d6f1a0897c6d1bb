"""Recurrent and hybrid models: after rejections a state must be what the text alone gives. Logits are compared with
Hugging Face's own; its recurrences compute in float32, so that these differ by more than a last bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import transformers as hf

from helpers import Oracle, hf_greedy, one_thread  # noqa: F401
from paceline.decoding.engine import Engine
from paceline.decoding.request import Request
from paceline.drafters.draft_model import DraftModel
from paceline.drafters.lookahead import Lookahead
from paceline.drafters.merge import Merge
from paceline.drafters.none import NoDrafter
from paceline.drafters.suffix import Suffix
from paceline.errors import OptionError, UnsupportedModel
from paceline.integrations.transformers import custom_generate
from paceline.policies.fixed import Fixed
from paceline.targets.reference import as_target
from paceline.targets.span import Span
from paceline.targets.stateful import FORGETFUL, MOST_PENDING, StatefulTarget
from paceline.targets.states import StateCache
from paceline.targets.target import Target
from targets.test_families import random_ids, reference

VOCAB = 257
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HYBRID = {**SIZES, "layer_types": ["linear_attention", "full_attention"] * 2}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_expand": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16}
NEMOTRON = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8}

MODELS = {
    "qwen3.5": (hf.Qwen3_5ForCausalLM, hf.Qwen3_5TextConfig, {**HYBRID, **DELTA}),
    "granite 4": (hf.GraniteMoeHybridForCausalLM, hf.GraniteMoeHybridConfig, {**HYBRID, **MAMBA, **EXPERTS}),
    "lfm2": (hf.Lfm2ForCausalLM, hf.Lfm2Config, {**SIZES, "layer_types": ["conv", "full_attention"] * 2}),
    "falcon-h1": (hf.FalconH1ForCausalLM, hf.FalconH1Config, {**SIZES, **MAMBA, "mamba_d_ssm": 64}),
    "nemotron-h": (
        hf.NemotronHForCausalLM,
        hf.NemotronHConfig,
        {**HYBRID, **NEMOTRON, "layer_types": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
    ),
    "mamba 2": (
        hf.Mamba2ForCausalLM,
        hf.Mamba2Config,
        {**SIZES, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    ),
    "zaya, with windows": (
        hf.ZayaForCausalLM,
        hf.ZayaConfig,
        {**SIZES, "layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": 8, "num_experts_per_tok": 1},
    ),
}
REFUSED = {
    "jamba": (hf.JambaForCausalLM, hf.JambaConfig, {**SIZES, "attn_layer_period": 2, "attn_layer_offset": 1}),
    "mamba": (hf.MambaForCausalLM, hf.MambaConfig, {**SIZES, "state_size": 8}),
    "falcon_mamba": (hf.FalconMambaForCausalLM, hf.FalconMambaConfig, {**SIZES, "state_size": 8}),
    "recurrent_gemma": (hf.RecurrentGemmaForCausalLM, hf.RecurrentGemmaConfig, SIZES),
    "minimax": (hf.MiniMaxForCausalLM, hf.MiniMaxConfig, HYBRID),
}


def make(name: str) -> hf.PreTrainedModel:
    model, config, fields = (MODELS | REFUSED)[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = model._from_config(config(**fields), experts_implementation="eager")
        for weight in made.parameters():
            weight.data += torch.randn_like(weight) * (0.1 if weight.dim() == 1 else 0.15)
    return made.double().eval()


@pytest.fixture(scope="module", params=list(MODELS))
def target(request: pytest.FixtureRequest) -> Target:
    made = as_target(make(request.param))
    assert isinstance(made, StatefulTarget)
    return made


def test_inside_transformers(target: Target) -> None:
    """`generate` makes a cache for such a model, and calls that of states alone by another name."""
    asked = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": VOCAB - 1}
    inputs = torch.tensor([[5, 6, 7, 5, 6]])
    want = target.model.generate(inputs, **asked)
    assert torch.equal(target.model.generate(inputs, custom_generate=custom_generate("suffix"), **asked), want)


def test_states_that_have_read_something() -> None:
    model, inputs = make("mamba 2"), torch.tensor([[5, 6, 7]])
    cache = model(inputs, use_cache=True).cache_params
    with pytest.raises(OptionError, match="filled cache_params"):
        model.generate(inputs, cache_params=cache, custom_generate=custom_generate("none"), max_new_tokens=2)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=3e-4 * float(want.std()))


@torch.inference_mode()
def test_rounds_of_a_ragged_batch(target: Target) -> None:
    """Rows that accept all, some or none of drafts of their own lengths; one is cleared, one moves."""
    contexts = [random_ids(n, seed=n).tolist() for n in (5, 17, 0)]
    cache = target.new_cache(3, 120)
    for row, context in enumerate(contexts):
        target.prefill(context, cache.rows(row, row + 1), chunk=7)
    drafts = random_ids(7, 3, 5, seed=3).tolist()
    for turn, draft in enumerate(drafts):
        widths = [1, 1, 1] if turn == 4 else [5, 3, 1 + turn % 2]
        ids = torch.tensor(
            [row[:width] + row[:1] * (max(widths) - width) for row, width in zip(draft, widths, strict=True)]
        )
        logits = target.forward(Span(ids, cache.lengths.copy()), cache).logits
        for row, width in enumerate(widths):
            close(logits[row, :width], reference(target, contexts[row] + draft[row][:width])[-width:])
        kept = [min(width, 1 + (turn * 7 + row * 3) % 5) for row, width in enumerate(widths)]
        cache.commit([range(n) for n in kept])
        for row, n in enumerate(kept):
            contexts[row] += draft[row][:n]
        if turn == 2:
            cache.move(2, 0)
            contexts[0] = list(contexts[2])
        if turn == 5:
            cache.rows(1, 2).clear()
            contexts[1] = random_ids(9, seed=8).tolist()
            target.prefill(contexts[1], cache.rows(1, 2))


@torch.inference_mode()
def test_taps_of_what_is_read_again(target: Target) -> None:
    """Hidden states and logits are those of the new tokens."""
    ids = random_ids(14)
    want = target.model(ids[None], output_hidden_states=True, use_cache=False)
    cache = target.new_cache(1, 20)
    target.prefill(ids[:8].tolist(), cache)
    target.forward(Span(torch.tensor([[*ids[8:10].tolist(), 3]]), cache.lengths.copy()), cache)
    cache.commit([[0, 1]])
    out = target.forward(Span(ids[None, 10:], cache.lengths.copy()), cache, [1])
    close(out.taps[1][0], want.hidden_states[1][0, 10:])
    close(out.logits[0], want.logits[0, 10:])


def test_greedy_text(target: Target) -> None:
    """Rows that come and go, with drafts that are right, half right and trees, of which a chain is kept."""
    prompts = [random_ids(n, seed=n).tolist() for n in (38, 20, 41)]
    new = 24
    truths = [hf_greedy(target.model, prompt, new) for prompt in prompts]
    drafter = Oracle(target, dict(zip(map(tuple, prompts), truths, strict=True)))
    # The longest row needs all of the cache, and is padded by what others read again.
    requests = [Request(prompt, limit=new, policy=Fixed(k=5)) for prompt in prompts]
    for _ in Engine(target, drafter).run(requests, batch=2):
        pass
    assert [request.output for request in requests] == truths
    assert all(any(round.accepted > 1 for round in request.stats.rounds) for request in requests)


def test_drafts_that_outgrow_a_ring_while_tokens_are_pending() -> None:
    """Its window then begins before these."""
    target = as_target(make("zaya, with windows"))

    class Lengths(Fixed):
        def __init__(self) -> None:
            super().__init__(k=28)
            self.turns = itertools.cycle((6, 6, 28))

        def more(self, depth: int) -> bool:
            if depth == 0:
                self.limit = next(self.turns)
            return super().more(depth)

    prompts = [random_ids(n, seed=n).tolist() for n in (38, 20)]
    new = 60
    truths = [hf_greedy(target.model, prompt, new) for prompt in prompts]
    drafter = Oracle(target, dict(zip(map(tuple, prompts), truths, strict=True)), turns=("half", "nonsense"))
    requests = [Request(prompt, limit=new, policy=Lengths()) for prompt in prompts]
    for batch in (requests[:1], requests[1:]):
        for _ in Engine(target, drafter).run(batch):
            pass
    assert [request.output for request in requests] == truths
    assert max(record.drafted for request in requests for record in request.stats.rounds) > 16


class TestPasses:
    """How often the model runs, over how many tokens."""

    @pytest.fixture
    def widths(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        widths: list[int] = []
        run = StatefulTarget._run
        monkeypatch.setattr(
            StatefulTarget,
            "_run",
            lambda self, window, *rest: widths.append(window.span.width) or run(self, window, *rest),
        )
        return widths

    def run(self, turns: list[str]) -> Request:
        target = as_target(make("lfm2"))
        prompt = [5, 6, 7]
        truth = hf_greedy(target.model, prompt, 40)
        request = Request(prompt, limit=40, policy=Fixed(k=3))
        self.before = None
        drafter = Oracle(target, {tuple(prompt): truth}, turns) if turns else NoDrafter(target)
        for _ in Engine(target, drafter).run([request]):
            pass
        assert request.output == truth
        return request

    def test_plain_decoding_and_right_drafts_read_nothing_again(self, widths: list[int]) -> None:
        self.run([])
        assert set(widths[-40:]) == {1}
        self.run(["truth"])
        assert max(widths[-10:]) == 4

    def test_rejections_are_bounded(self, widths: list[int]) -> None:
        """What is pending is read into the state before it grows too long."""
        request = self.run(["nonsense"])
        passes = widths[-len(request.stats.rounds) - 40 // MOST_PENDING :]
        assert max(passes) <= MOST_PENDING + 4
        assert MOST_PENDING + 1 in passes


def test_memory_of_states_does_not_grow_with_the_text() -> None:
    target = as_target(make("mamba 2"))
    caches = [target.new_cache(1, capacity) for capacity in (16, 4096)]
    assert all(isinstance(cache, StateCache) and not cache.tensors for cache in caches)
    assert [cache.capacity for cache in caches] == [16, 4096]


@torch.inference_mode()
def test_padding_of_what_is_read_again_fits() -> None:
    """A row that fills its slots beside one that reads tokens again; what reaches further is an error, not a wrap."""
    target = as_target(make("lfm2"))
    cache = target.new_cache(2, 12)
    ids = random_ids(2, 12)
    for row, length in enumerate((9, 4)):
        target.prefill(ids[row, :length].tolist(), cache.rows(row, row + 1))
    target.forward(Span(torch.stack([ids[0, 9:11], ids[1, 4:6]]), cache.lengths.copy()), cache)
    cache.commit([[0, 1], [0]])
    assert [len(pending) for pending in cache.pending] == [0, 1]
    logits = target.forward(Span(torch.stack([ids[0, 11:], ids[1, 5:6]]), cache.lengths.copy()), cache).logits
    close(logits[0], reference(target, ids[0].tolist())[-1:])
    close(logits[1], reference(target, ids[1, :6].tolist())[-1:])
    with pytest.raises(IndexError):
        target.forward(Span(random_ids(2, 30), cache.lengths.copy()), cache)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_for_a_reason(name: str) -> None:
    """transformers itself does not go on from their states by several tokens, or keeps them elsewhere."""
    with pytest.raises(UnsupportedModel, match=f"{name} models (do not go on|keep)") as error:
        as_target(make(name))
    assert "\n" not in str(error.value)


def test_what_needs_trees_or_takes_back_is_refused() -> None:
    target = as_target(make("lfm2"))
    with pytest.raises(OptionError, match="reads chains only"):
        Engine(target, Lookahead(target))
    with pytest.raises(OptionError, match=r"draft-model: .* no rejected token can be taken back"):
        DraftModel(target, model=target)
    with pytest.raises(OptionError, match="merge drafts trees"):
        Engine(target, Merge(target, drafters=[NoDrafter(target), Suffix(target)]))
    cache = target.new_cache(1, 8)
    tree = Span(
        torch.zeros(1, 3, dtype=torch.long), np.zeros(1, np.int64), 0, torch.tensor([[0, 1, 1]]), torch.eye(3)[None] > 0
    )
    with pytest.raises(ValueError, match="read chains"):
        target.forward(tree, cache)
    with pytest.raises(ValueError, match="follows a pass"):
        cache.commit([[0]])


@pytest.mark.parametrize("name", [name for name in REFUSED if name in FORGETFUL])
def test_the_proof_finds_those_that_forget(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the usual initialisation too, where a state that is left out changes little."""
    monkeypatch.setattr("paceline.targets.stateful.FORGETFUL", ())
    model, config, fields = REFUSED[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = model(config(**fields))
    with pytest.raises(UnsupportedModel, match="drafts cannot be verified"):
        as_target(made.eval())


def test_a_model_that_fails_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatefulTarget, "prefill", lambda *_: 1 // 0)
    with pytest.raises(UnsupportedModel, match=r"lfm2 models cannot .* by zero"):
        as_target(make("lfm2"))
