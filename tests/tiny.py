"""Tiny models and a byte-level tokenizer, made on the spot: `from tiny import small_llama`."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = "<|end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    """One token a byte (ids 0-255 in the order of the byte-level alphabet), then the end-of-sequence token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=EOS, clean_up_tokenization_spaces=False)
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


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
