"""A tiny random model of every causal architecture that transformers has."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers import logging as hf_logging
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

VOCABULARY, CONTEXT, WINDOW = 96, 128, 8
LARGEST = 40_000_000  # weights

#: What a configuration gets for each of these fields that it has.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "n_positions": CONTEXT,
    "initializer_range": 0.2,  # the usual 0.02 gives nearly flat logits, and greedy ties
    "init_std": 0.2,
    "eos_token_id": None,
    "pad_token_id": 0,
    "forced_eos_token_id": None,  # `generate` would end BART's text with it
    # how large
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "dff": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "num_layers": 4,
    "decoder_layers": 2,
    "decoder_ffn_dim": 48,
    # heads
    "num_attention_heads": 4,
    "n_head": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "rotary_dim": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 12,
    "v_head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "swa_v_head_dim": 8,
    "index_head_dim": 8,
    "index_n_heads": 2,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    # how far back
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "attention_window_size": WINDOW,
    "sliding_window_size": WINDOW,
    "window_size": WINDOW,
    # states
    "mamba_d_state": 4,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_headdim": 16,
    "mamba_d_ssm": 64,
    "mamba_n_groups": 1,
    "mamba_ngroups": 1,
    "n_groups": 1,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "mamba_dt_rank": 4,
    "n_mamba_heads": 2,
    "ssm_state_size": 4,
    "state_size": 4,
    "time_step_rank": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}
MLA = {"head_dim": 4, "num_key_value_heads": 4}  # of latent attention: the part that is rotated
SPARSE = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8}
SPARSE |= {"indexer_compress_ratio": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
DOTS = MLA | {f"swa_{name}": size for name, size in {"num_attention_heads": 4, "q_lora_rank": 16}.items()}
DOTS |= {"swa_num_key_value_heads": 4, "swa_kv_lora_rank": 8, "swa_head_dim": 12, "swa_qk_nope_head_dim": 8}
HYBRID = {"layer_types": ["mamba", "attention"] * 2}
ENCODERS = {"is_decoder": True}
#: And what some need besides, since their fields hang together in ways of their own.
BESIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), MLA
    ),
    **dict.fromkeys(("longcat_flash", "minicpm3", "youtu", "dots3_note_text"), MLA),
    **dict.fromkeys(
        ("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"), ENCODERS
    ),
    **dict.fromkeys(("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roformer", "xmod"), ENCODERS),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl", "roc_bert"), ENCODERS),
    "bailing_hybrid": MLA | {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "blenderbot": {"encoder_layers": 1, "encoder_ffn_dim": 8, "encoder_attention_heads": 4},
    "granitemoehybrid": HYBRID,
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dots3_note_text": DOTS,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "kimi_linear": MLA | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 4},
    "plbart": {"encoder_layers": 1, "encoder_attention_heads": 4},
    "prophetnet": {"num_decoder_layers": 2, "num_decoder_attention_heads": 4, "decoder_start_token_id": 0},
    "roc_bert": ENCODERS | {"shape_vocab_size": 96, "pronunciation_vocab_size": 96},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "whisper": {"encoder_layers": 1, "encoder_attention_heads": 4},
    "xlm": {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "n_words": VOCABULARY},
    "xlstm": {"num_heads": 2, "num_blocks": 2, "hidden_size": 128},
    "xmod": ENCODERS | {"default_language": "en_XX"},
    "zamba2": {"n_mamba_heads": 4, "layer_types": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]},
    "qwen4_exp": {"text_config": SPARSE},
    "qwen4_exp_text": SPARSE,
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zaya": {"num_experts_per_tok": 1},
}


#: Drafters of larger models: they read hidden states, not tokens alone.
NO_MODEL = ("gemma4_assistant", "gemma4_unified_assistant")


def architectures() -> list[str]:
    """Every model type that has a causal language model."""
    return [kind for kind, config in CONFIG_MAPPING.items() if config in MODEL_FOR_CAUSAL_LM_MAPPING]


def make(kind: str, dtype: torch.dtype = torch.float32, **besides: Any) -> PreTrainedModel:
    """A random model of this type.

    Args:
        besides: fields of its configuration, besides `SIZES`.

    Raises:
        ValueError: its configuration needs more than `SIZES` to be small, or it is no model of its own.
    """
    if kind in NO_MODEL:
        raise ValueError("a drafter that reads the hidden states of another model")
    hf_logging.set_verbosity_error()
    config = _config(CONFIG_MAPPING[kind], BESIDES.get(kind, {}) | besides)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not issubclass(type(config), model_class.config_class):  # as AutoModelForCausalLM does
        config = getattr(config, "decoder", None) or config.get_text_config()
    with torch.device("meta"):
        count = model_class._from_config(deepcopy(config)).num_parameters()
    if count > LARGEST:
        raise ValueError(f"{kind} is not tiny: {count / 1e6:.0f} million weights")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class._from_config(config)
        for weight in model.parameters():  # biases and norms start as 0 and 1, where a mistake cannot be seen
            if weight.dim() <= 1:
                torch.nn.init.normal_(weight, mean=weight.mean().item(), std=0.2)
    return model.to(dtype).eval()


def _config(config_class: type[PretrainedConfig], besides: dict[str, Any]) -> PretrainedConfig:
    """The class's configuration with `SIZES` in it, and in the configurations inside it."""
    parts = getattr(config_class, "sub_configs", None) or {}
    plain = config_class()
    has = vars(plain)
    made = {name: type(has[name]) for name in parts if isinstance(has.get(name), PretrainedConfig)}
    inside = {name: _config(kind, besides.get(name, {})) for name, kind in made.items()}
    sizes = {name: value for name, value in SIZES.items() if name in has or name in config_class.attribute_map}
    return config_class(**{**sizes, **besides, **inside})
