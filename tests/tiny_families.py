"""A tiny random model of every family of the table, with sizes that divide nothing, and with settings on that change
what layers compute.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

VOCAB, CONTEXT = 131, 160
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 60,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
GQA = {"num_key_value_heads": 2}
WIDE = {**GQA, "head_dim": 14}  # the heads together are wider than what enters them
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3}
FULL = ["full_attention"] * 3
MIXED = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0, "attention_multiplier": 0.2}
GEMMA_2 = {"query_pre_attn_scalar": 9, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
GEMMA_3 = {"query_pre_attn_scalar": 9, "final_logit_softcapping": 3.0}
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40, "rope_theta": 150.0}
QWEN_MOE = {**EXPERTS, "moe_intermediate_size": 44, "sliding_window": None}

#: By variant: what its classes begin with, and fields of its configuration.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**GQA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "seed_oss": ("SeedOss", {**WIDE, "attention_bias": True, "attention_out_bias": True}),
    "arcee": ("Arcee", {**WIDE, "mlp_bias": True}),
    "cohere": ("Cohere", {"num_key_value_heads": 1, "logit_scale": 0.3}),
    "cohere-norms": ("Cohere", {**GQA, "use_qk_norm": True, "logit_scale": 0.3}),
    "ernie4_5": ("Ernie4_5", {**WIDE, "use_bias": True}),
    "cohere2": ("Cohere2", {**GQA, **MIXED, "logit_scale": 0.3}),
    "exaone4": ("Exaone4", {**WIDE, "sliding_window": None, "layer_types": FULL}),
    "exaone4-windows": ("Exaone4", {**WIDE, **MIXED}),
    "gemma": ("Gemma", {"num_key_value_heads": 1, "head_dim": 14}),
    "gemma2": ("Gemma2", {**WIDE, **GEMMA_2, **MIXED}),
    "gemma3": ("Gemma3", {**WIDE, **GEMMA_3, **MIXED}),
    "glm": ("Glm", {**GQA, "head_dim": 16, "attention_bias": True}),
    "glm4": ("Glm4", {**GQA, "head_dim": 16, "attention_bias": True}),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.4}),
    "gpt_neox-sequential": ("GPTNeoX", {"use_parallel_residual": False}),
    "granite": ("Granite", {**GQA, **GRANITE}),
    "helium": ("Helium", {"num_key_value_heads": 3, "head_dim": 10}),
    "hunyuan": ("HunYuanDenseV1", WIDE),
    "mistral-windows": ("Mistral", {**WIDE, "sliding_window": 9}),
    "nemotron": ("Nemotron", {**WIDE, "partial_rotary_factor": 0.3}),
    "olmo": ("Olmo", {**GQA, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", GQA),
    "olmo3": ("Olmo3", {**GQA, **MIXED, "rope_parameters": ROPES}),
    "phi": ("Phi", {**GQA, "partial_rotary_factor": 0.4}),
    "phi-norms": ("Phi", {"partial_rotary_factor": 0.4, "qk_layernorm": True}),
    "phi3": ("Phi3", {**GQA, "partial_rotary_factor": 0.4}),
    "phi3-windows": ("Phi3", {**GQA, "partial_rotary_factor": 0.4, "sliding_window": 9}),
    "qwen2-windows": ("Qwen2", {**GQA, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3-windows": ("Qwen3", {**WIDE, **MIXED, "use_sliding_window": True}),
    "smollm3": ("SmolLM3", {**GQA, "no_rope_layers": [1, 0, 1]}),
    "stablelm": ("StableLm", {**GQA, "use_qkv_bias": True}),
    "stablelm-parallel": ("StableLm", {**GQA, "use_parallel_residual": True}),
    "starcoder2": ("Starcoder2", {**GQA, "sliding_window": None}),
    "granitemoe": ("GraniteMoe", {**GQA, **GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "GptOss",
        {
            **WIDE,
            **MIXED,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.5,
            "rope_parameters": YARN,
        },
    ),
    "mixtral": ("Mixtral", {**GQA, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}),
    "olmoe": ("Olmoe", {**GQA, **EXPERTS}),
    "qwen2_moe": ("Qwen2Moe", {**GQA, **QWEN_MOE, "shared_expert_intermediate_size": 50, "mlp_only_layers": [1]}),
    "qwen3_moe": ("Qwen3Moe", {**WIDE, **QWEN_MOE, "norm_topk_prob": True, "decoder_sparse_step": 2}),
}
#: What the torch tier says of those that it does not run.
NOT_ON_TORCH = {
    "arcee": "activation relu2",
    "cohere-norms": "norms of heads",
    "hunyuan": "norms of heads",
    "nemotron": "activation relu2",
    "phi": "activation gelu_new",
    "phi-norms": "activation gelu_new",
    "starcoder2": "activation gelu_pytorch_tanh",
}


def tiny(variant: str, attention: str = "sdpa", **fields: object) -> hf.PreTrainedModel:
    """In float32. Attention with sinks, or whose scores are capped, knows no SDPA."""
    name, own = VARIANTS[variant]
    kind = "Gemma3Text" if name == "Gemma3" else name
    config = getattr(hf, f"{kind}Config")(**(SIZES | own | fields))
    attention = "eager" if name == "GptOss" or "softcap" in " ".join(own) else attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(hf, f"{name}ForCausalLM")
        made: Any = model._from_config(config, attn_implementation=attention, experts_implementation="eager")
        for weight in made.parameters():  # what starts as 0 or 1 hides mistakes; routers too start as 0
            if weight.dim() == 1 or not weight.any():
                torch.nn.init.normal_(weight, mean=weight.mean().item(), std=0.3)
    return made.eval()
