"""Tiny models whose files have a layer for multi-token prediction, in the layouts that real ones are published in."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

try:
    from transformers.modeling_layers import MtpModel
except ImportError:  # before 5.23
    MtpModel = None

from tiny import byte_tokenizer

LAYERS = 4  # of the model itself
WINDOW = 12  # of layers that have one

COMMON: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 8,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
ROUTED = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}

#: Of a model that sees, the part that nobody looks at.
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}

#: By architecture: fields of its configuration, and how it tells the number of its MTP layers.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {"num_mtp_layers": 1}),
    "qwen3_5_text": (LINEAR, {"mtp_num_hidden_layers": 1}),
    "qwen3_5": (LINEAR, {"mtp_num_hidden_layers": 1}),
    "mellum": (
        {**EXPERTS, "head_dim": 8, "num_experts": 4, "sliding_window": WINDOW},
        {"num_nextn_predict_layers": 1, "mtp_layer_types": ["sliding_attention"], "mtp_mlp_layer_types": ["sparse"]},
    ),
    "qwen3_next": (LINEAR | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16}, {}),
    "glm4_moe": (ROUTED | {"head_dim": 8, "first_k_dense_replace": 1}, {"num_nextn_predict_layers": 1}),
    "deepseek_v3": (ROUTED | LATENT | {"first_k_dense_replace": 1}, {"num_nextn_predict_layers": 1}),
}
COUNTED_ON = ("glm4_moe", "deepseek_v3")  # whose MTP layers come after the model's own, under the next number


def write(kind: str, folder: Path, seed: int = 0) -> Path:
    """A model of float32 in `folder`. Its layers add little to the embedding of a token, and its MTP layer adds little
    to that of the next one: so the two often say the same, but not always.
    """
    torch.manual_seed(seed)
    model = _random(kind, KINDS[kind][0])  # with one layer more, which becomes the MTP layer
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensors[name] *= 0.015
    save_file(_published(kind, tensors), folder / "model.safetensors", {"format": "pt"})
    facts = json.loads((folder / "config.json").read_text())
    text = facts.get("text_config", facts)
    text |= {"num_hidden_layers": LAYERS, **KINDS[kind][1]}
    for name in ("layer_types", "mlp_layer_types"):
        if text.get(name):
            text[name] = text[name][:LAYERS]
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


def _random(kind: str, fields: dict[str, Any]) -> PreTrainedModel:
    fields = COMMON | fields | {"num_hidden_layers": LAYERS + 1}
    if kind == "mellum":
        fields["layer_types"] = ["full_attention", *["sliding_attention"] * LAYERS]
    elif "linear_num_key_heads" in fields:
        fields["layer_types"] = ["linear_attention"] * 3 + ["full_attention"] * 2
    if kind == "qwen3_5":
        sees = AutoConfig.for_model(kind, text_config=fields, vision_config=VISION)
        return AutoModelForImageTextToText.from_config(sees, dtype=torch.float32)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields), dtype=torch.float32)


def _published(kind: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    size = COMMON["hidden_size"]
    decoder = "model." if "model.norm.weight" in tensors else "model.language_model."
    norm = tensors[f"{decoder}norm.weight"]
    generator = torch.Generator().manual_seed(1)
    matrix = torch.cat([torch.eye(size), 0.1 * torch.randn(size, size, generator=generator) * size**-0.5], 1)
    last = f"{decoder}layers.{LAYERS}."
    if kind in COUNTED_ON:
        own = {"enorm": norm, "hnorm": norm, "eh_proj": matrix, "shared_head.norm": norm}
        own["shared_head.head"], own["embed_tokens"] = tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
        return tensors | {f"{last}{name}.weight": part.clone() for name, part in own.items()}
    own = {"pre_fc_norm_embedding": norm, "pre_fc_norm_hidden": norm, "fc": matrix, "norm": norm}
    moved = {
        f"mtp.layers.0.{name.removeprefix(last)}" if name.startswith(last) else name: part
        for name, part in tensors.items()
    }
    return moved | {f"mtp.{name}.weight": part.clone() for name, part in own.items()}


def random_layer(model: PreTrainedModel, seed: int = 0) -> MtpModel:
    """An MTP layer of random weights for a model without one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        described = deepcopy(model.config)
        model.config.num_mtp_layers = 1
        try:
            return MtpModel(model, 1).to(model.dtype)
        finally:
            model.config = described


def save_random_layer(model: PreTrainedModel, folder: Path) -> None:
    """The same in a folder."""
    tensors = random_layer(model).state_dict()
    own = {f"mtp.{name}": tensor.clone() for name, tensor in tensors.items() if name.startswith("layers.")}
    folder.mkdir()
    model.config.save_pretrained(folder)
    save_file(own, folder / "model.safetensors", {"format": "pt"})
