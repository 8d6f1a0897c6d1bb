"""Models that count positions by their cache: each row alone, in chains, with the output of their own `generate`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import paceline
from helpers import hf_greedy, one_thread  # noqa: F401
from paceline.drafters.draft_model import DraftModel
from paceline.errors import OptionError, UnsupportedModel
from paceline.targets import as_target
from paceline.targets.ordered import OrderedTarget
from paceline.targets.span import Span
from paceline.targets.whole import WholeTarget
from tiny import small_llama
from told import told

VOCAB, CONTEXT = 96, 44  # where the last of the prompts ends
PROMPTS = [[7, 11, 13, 7, 11], [5, 9, 17, 21, 5, 9, 17, 30, 5], list(range(40, 60))]  # the last beyond local attention
BART = {
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": CONTEXT,
    "forced_eos_token_id": None,
    "is_decoder": True,
    "init_std": 0.3,
}
BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": CONTEXT,
    "is_decoder": True,
    "initializer_range": 0.3,
}
BLOOM = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
LOCAL = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 8,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
}
MPT = {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": CONTEXT, "initializer_range": 0.3}
MODELS = {
    "bart": (hf.BartForCausalLM, hf.BartConfig, BART),
    "bloom": (hf.BloomForCausalLM, hf.BloomConfig, BLOOM),
    "gpt_neo": (hf.GPTNeoForCausalLM, hf.GPTNeoConfig, LOCAL),
    "mpt": (hf.MptForCausalLM, hf.MptConfig, MPT),
    "roformer": (hf.RoFormerForCausalLM, hf.RoFormerConfig, BERT),
}
TREES = {  # that take the positions `generate` gives, or keep their cache inside another one
    "roberta": (hf.RobertaForCausalLM, hf.RobertaConfig, BERT),
    "rembert": (hf.RemBertForCausalLM, hf.RemBertConfig, BERT | {"input_embedding_size": 32}),
}


def make(name: str) -> hf.PreTrainedModel:
    model, config, fields = (MODELS | TREES)[name]
    special = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = model(config(vocab_size=VOCAB, **fields, **special))
        for weight in made.parameters():
            weight.data += torch.randn_like(weight) * 0.1 * (weight.dim() == 1)
    return made.double().eval()


@pytest.mark.parametrize("name", MODELS | TREES)
def test_the_output_of_generate(name: str) -> None:
    """With drafts of many branches, alone and in a ragged batch, up to the end of the context."""
    model = make(name)
    want = [hf_greedy(model, prompt, 24) for prompt in PROMPTS]
    llm = paceline.load(model, drafter="recycling+fixed:k=4")
    assert isinstance(llm.target, OrderedTarget) == llm.target.chains_only == (name in MODELS)
    options = {"max_new_tokens": 24, "eos": ()}
    assert [llm.generate(prompt, **options).tokens for prompt in PROMPTS] == want
    outputs = llm.generate(PROMPTS, **options)
    assert [output.tokens for output in outputs] == want
    assert max(output.stats.tau for output in outputs) > 1  # some drafts are right, most are wrong


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_type_lets_trees_through(name: str, dtype: torch.dtype) -> None:
    """Rounding must not hide that positions are counted."""
    model = make(name).to(dtype)
    assert isinstance(as_target(model), OrderedTarget)


@pytest.mark.parametrize("name", ["bart", "mpt"])
@torch.inference_mode()
def test_padding_beyond_the_context(name: str) -> None:
    """A row at the end of its context beside one with a longer draft: nobody looks up a position that is not there."""
    target = as_target(make(name))
    assert target.context == CONTEXT
    cache = target.new_cache(2, CONTEXT + 8)
    cache.lengths[:] = CONTEXT - 2, 5
    ids = torch.full((2, 4), 7)
    out = target.forward(Span(ids, cache.lengths.copy()), cache, taps=(1,))
    assert out.logits.shape == (2, 4, VOCAB)
    assert out.taps[1].shape == (2, 4, 32)
    assert not out.logits[0, 2:].any()
    assert out.logits[0, 1].any()
    tree = Span(ids[:1], np.zeros(1, np.int64), 0, torch.zeros(1, 4).long(), torch.eye(4)[None] > 0)
    with pytest.raises(ValueError, match="reads chains"):
        target.forward(tree, cache.rows(0, 1))


def test_as_a_draft_model() -> None:
    """What it drafted in vain is taken back."""
    model, near = make("bloom"), make("bloom")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for weight in near.parameters():
            weight.data += torch.randn_like(weight) * 0.05
    draft: Any = as_target(near)
    llm = paceline.load(model, drafter=lambda target: DraftModel(target, model=draft))
    outputs = llm.generate(PROMPTS, max_new_tokens=16, eos=())
    assert [output.tokens for output in outputs] == [hf_greedy(model, prompt, 16) for prompt in PROMPTS]
    assert 0 < sum(output.stats.accepted for output in outputs) < sum(output.stats.drafted for output in outputs)


def test_trees_are_refused() -> None:
    with told(OptionError, "lookahead drafts trees, and .* reads chains only"):
        paceline.load(make("mpt"), drafter="lookahead")


REFUSED = {
    "openai-gpt": (hf.OpenAIGPTLMHeadModel, hf.OpenAIGPTConfig, "keep no cache of keys and values in transformers"),
    "xlm": (hf.XLMWithLMHeadModel, hf.XLMConfig, "keep no cache of keys and values in transformers, only logits"),
    "prophetnet": (hf.ProphetNetForCausalLM, hf.ProphetNetConfig, "do not go on from a cache by several tokens"),
}
SMALL = {
    "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "xlm": {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "n_words": VOCAB},
    "prophetnet": {
        "hidden_size": 32,
        "num_decoder_layers": 1,
        "num_decoder_attention_heads": 4,
        "decoder_ffn_dim": 48,
        "is_decoder": True,
        "is_encoder_decoder": False,
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_for_what_transformers_does(name: str) -> None:
    model, config, says = REFUSED[name]
    with told(UnsupportedModel, f"{name} models {says}"):
        as_target(model(config(vocab_size=VOCAB, **SMALL[name])).eval())


def test_first_refusal_is_told() -> None:
    """Of a model that neither road runs."""
    model = small_llama()
    model.forward = lambda *args, **kwargs: 1 // 0
    with told(UnsupportedModel, r"llama models do not run.*, in transformers: .* by zero"):
        as_target(model)


def test_local_attention_takes_no_trees() -> None:
    with told(UnsupportedModel, "counts its window by slot"):
        WholeTarget(make("gpt_neo"))
