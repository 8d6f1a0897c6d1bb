"""Tiny models and a byte-level tokenizer, made on the spot: `from tiny import small_llama`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

EOS = "<|end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())  # that stand for bytes


def byte_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    """One token a byte (ids 0-255 in the order of the byte-level alphabet), then the end-of-sequence token."""
    tokenizer = pair_tokenizer(LETTERS, [], EOS)
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def pair_tokenizer(letters: Sequence[str], pairs: Sequence[tuple[str, str]], eos: str) -> PreTrainedTokenizerFast:
    """One token for each of these letters, and for each of these pairs, and the end-of-sequence token."""
    names = [*letters, *(left + right for left, right in pairs)]
    core = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, list(pairs)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, clean_up_tokenization_spaces=False)


def with_tokens(model: PreTrainedModel, tokens: Sequence[int]) -> PreTrainedModel:
    """The model, with these of its tokens for its vocabulary, in this order."""
    places = (model.get_input_embeddings(), model.get_output_embeddings())
    rows = [place.weight.data[list(tokens)] for place in places]
    model.resize_token_embeddings(len(tokens), mean_resizing=False)
    for place, kept in zip((model.get_input_embeddings(), model.get_output_embeddings()), rows, strict=True):
        place.weight.data.copy_(kept)
    return model


def small_llama(seed: int = 0, **config: object) -> LlamaForCausalLM:
    """A random Llama over the byte tokenizer's vocabulary, float64; `config` overrides fields of LlamaConfig."""
    fields: dict[str, object] = {
        "vocab_size": 257,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,  # the usual 0.02 gives nearly flat logits, and greedy ties
        "bos_token_id": None,
        "eos_token_id": 256,
        "pad_token_id": None,
        "tie_word_embeddings": True,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**(fields | config)))
    return model.double().eval()
