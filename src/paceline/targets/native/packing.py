"""The weights of a Hugging Face model, or of a head's layers, packed for the C++ pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from paceline.targets.native.model import ACTIVATIONS, ExpertWeights, LayerWeights, NativeModel, Sizes
from paceline.targets.native.rough import Rough
from paceline.targets.native.storage import OUTPUT, Storage
from paceline.targets.native.weights import BLOCK, Kind, Packed
from paceline.targets.parts import ExpertParts, LayerParts, ModelParts, Norm


def pack(parts: ModelParts, mode: str, dtype: torch.dtype, source: Path) -> tuple[NativeModel, Packed]:
    """All weights, taken away from the model, and the embeddings among them.

    Args:
        mode: see `Storage`.
        dtype: of matrix products.
        source: a GGUF file whose blocks these weights may be.
    """
    family, rounded, count = parts.family, dtype == torch.bfloat16, parts.config.num_hidden_layers
    blocks = source if source.is_file() and not rounded else None  # they are other weights than those rounded
    heads = {"q_proj": parts.heads, "k_proj": parts.kv_heads}
    storage = Storage(mode, blocks, count, heads, Kind.BF16 if rounded else Kind.F32)
    layers = []
    for index in range(count):
        layers.append(_pack_layer(storage, parts.layer(index), family.gated))
        _release(parts.decoder.layers[index])
    embed, head = parts.inputs, parts.outputs
    tied = head.weight.data_ptr() == embed.weight.data_ptr() and head.bias is None
    embedding = storage.pack({f"{family.decoder}.{family.embed}": embed})
    output = embedding if tied else storage.pack({OUTPUT: head})
    if tied:
        head.weight = embed.weight  # both empty now
    sizes = _sizes(parts, layers)
    # A cap may make different logits equal, and a factor below 0 turns them around.
    rough = None if sizes.logit_cap or sizes.logit_scale <= 0 else Rough.of(output)
    return NativeModel(sizes, layers, _float(parts.norm), output, rough), embedding


def _sizes(parts: ModelParts, layers: Sequence[LayerWeights]) -> Sizes:
    config, family, any_layer = parts.config, parts.family, layers[0]
    queries = any_layer.query_norm.weight if any_layer.query_norm else torch.empty(0)
    moe = next((layer.experts for layer in layers if layer.experts), None)
    chosen, normalised = parts.routing or (0, False)
    return Sizes(
        hidden=config.hidden_size,
        heads=parts.heads,
        kv_heads=parts.kv_heads,
        head_dim=parts.head_dim,
        rotary=parts.rotary,
        inner=max((layer.down.c.inputs for layer in layers if layer.down), default=0),
        activation=ACTIVATIONS.index(parts.activation),
        gated=family.gated,
        parallel=parts.parallel,
        norm_whole=queries.dim() == 1 and queries.numel() != parts.head_dim,
        norm_each=queries.dim() == 2,
        norm_rotated=family.norms_rotated,
        experts=len(moe.down) if moe else 0,
        chosen=chosen if moe else 0,
        expert_inner=moe.down[0].c.inputs if moe else 0,
        normalised=normalised,
        ragged=any(matrix.c.inputs % BLOCK for layer in layers for matrix in layer.matrices()),
        scale=parts.score_scale,
        score_cap=family.cap(config, family.score_cap) or 0.0,
        residual_scale=family.number(config, family.residual_scale),
        swiglu_alpha=parts.swiglu[0],
        swiglu_limit=parts.swiglu[1],
        logit_scale=family.logits_factor(config),
        logit_cap=family.cap(config, family.logit_cap) or 0.0,
    )


def _pack_layer(storage: Storage, layer: LayerParts, gated: bool) -> LayerWeights:
    return LayerWeights(
        qkv=storage.pack(layer.qkv),
        out=storage.pack(layer.out),
        gate_up=storage.pack(layer.up, interleaved=gated) if layer.up else None,
        down=storage.pack(layer.down) if layer.down else None,
        attention_norm=_float(layer.attention_norm),
        mlp_norm=_float(layer.mlp_norm),
        attention_post_norm=_float(layer.attention_post_norm),
        mlp_post_norm=_float(layer.mlp_post_norm),
        query_norm=_float(layer.query_norm),
        key_norm=_float(layer.key_norm),
        experts=_pack_experts(storage, layer.experts) if layer.experts else None,
        sinks=None if layer.sinks is None else layer.sinks.float().contiguous(),
        rope=layer.rope,
        window=layer.window,
    )


def _pack_experts(storage: Storage, experts: ExpertParts) -> ExpertWeights:
    return ExpertWeights(
        router=storage.pack(experts.router),
        gate_up=tuple(storage.pack(modules, interleaved=True) for modules in experts.gate_up),
        down=tuple(storage.pack(modules) for modules in experts.down),
        shared_gate=storage.pack(experts.shared_gate) if experts.shared_gate else None,
    )


def _release(layer: nn.Module) -> None:
    """What was packed: the matrices."""
    for module in layer.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.dim() > 1:
                setattr(module, name, nn.Parameter(torch.empty(0), requires_grad=False))


def _float(norm: Norm | None) -> Norm | None:
    if norm is None:
        return None
    bias = None if norm.bias is None else norm.bias.float().contiguous()
    return Norm(norm.weight.float().contiguous(), bias, norm.eps, norm.centred)
