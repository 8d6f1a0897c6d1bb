"""A Hugging Face model's weights, taken over: fused, perhaps packed, and in one form for every family."""

from __future__ import annotations

import copy
import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from paceline.errors import ModelError, UnsupportedModel
from paceline.targets.families import FAMILIES, LLAMA
from paceline.targets.linear import PackedLinear, PackedRows, PlainLinear
from paceline.targets.plain_weights import check_plain

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Linear = PlainLinear | PackedLinear
MakeLinear = Callable[[Tensor, Tensor | None], Linear]


@dataclass
class Norm:
    """An RMS norm, or a layer norm where there is a bias."""

    weight: Float[Tensor, " size"]
    bias: Float[Tensor, " size"] | None
    eps: float


@dataclass
class FusedLayer:
    attention_norm: Norm | None  # None, here and below: what would be normed is read as it is
    qkv: Linear  # rows: the heads' queries, then keys, then values
    query_norm: Norm | None  # of each head
    key_norm: Norm | None
    out: Linear
    mlp_norm: Norm | None
    up: Linear  # the gate's rows, then the others, where the MLP is gated
    down: Linear


@dataclass
class Shape:
    """What the arithmetic must know of a model besides its weights."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool  # silu(gate) * up; otherwise gelu(up)
    parallel: bool  # attention and MLP both read the layer's input


@dataclass
class Weights:
    shape: Shape
    embed: Callable[[Tensor], Tensor]
    layers: list[FusedLayer]
    norm: Norm | None
    head: Linear
    rotary: nn.Module

    @property
    def linears(self) -> list[Linear]:
        return [*(part for layer in self.layers for part in (layer.qkv, layer.out, layer.up, layer.down)), self.head]


def check(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel, saying why, unless `absorb` can take this model over."""
    config = model.config.get_text_config()
    family, activation = FAMILIES.get(config.model_type), getattr(config, "hidden_act", None)
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    reasons = {
        f"models of type {config.model_type}": family is None,
        f"activation {activation}": activation != ("silu" if family is LLAMA else "gelu"),
        f"rotary embeddings of type {rope}": "dynamic" in rope or rope == "longrope",  # change with the length
    }
    for reason, found in reasons.items():
        if found:
            raise UnsupportedModel(f"the torch tier does not support {reason}: use the reference tier")
    check_plain(model)


@torch.no_grad()
def absorb(model: PreTrainedModel, linear: MakeLinear) -> Weights:
    """Move the weights of a checked model into fused linears, layer by layer, freeing its own on the way.

    The model keeps its configuration; its forward and generate raise ModelError from now on.
    """
    config = model.config.get_text_config()
    family = FAMILIES[config.model_type]
    decoder: Any = getattr(model, family.decoder)
    inputs: Any = model.get_input_embeddings()
    outputs: Any = model.get_output_embeddings()
    fuse = _llama_layer if family is LLAMA else _neox_layer

    head = linear(outputs.weight.detach(), outputs.bias)
    embed = _embedding(inputs.weight.detach(), head, tied=inputs.weight is outputs.weight)
    _replaced(outputs.weight, head)
    outputs.to("meta")
    if isinstance(embed, PackedRows):
        inputs.to("meta")
    layers = []
    for layer in decoder.layers:
        layers.append(fuse(layer, linear))
        layer.to("meta")
    heads = config.num_attention_heads
    shape = Shape(
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        gated=family is LLAMA,
        parallel=family.parallel_residual and config.use_parallel_residual,
    )
    rotary = copy.deepcopy(decoder.rotary_emb)
    weights = Weights(shape, embed, layers, _norm(getattr(decoder, family.norm)), head, rotary)
    _retire(model, decoder)
    return weights


def _llama_layer(layer: Any, linear: MakeLinear) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    return FusedLayer(
        _norm(layer.input_layernorm),
        _fuse([attention.q_proj, attention.k_proj, attention.v_proj], linear),
        _norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        _norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        _fuse([attention.o_proj], linear),
        _norm(layer.post_attention_layernorm),
        _fuse([mlp.gate_proj, mlp.up_proj], linear),
        _fuse([mlp.down_proj], linear),
    )


def _neox_layer(layer: Any, linear: MakeLinear) -> FusedLayer:
    attention = layer.attention

    def apart(rows: Tensor) -> Tensor:  # [heads, (q, k, v), head_dim] -> [(q, k, v), heads, head_dim]
        size = attention.head_size
        return rows.view(-1, 3, size, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    mixed = attention.query_key_value
    qkv = linear(apart(mixed.weight.detach()), None if mixed.bias is None else apart(mixed.bias.detach()))
    _replaced(mixed.weight, qkv)
    return FusedLayer(
        _norm(layer.input_layernorm),
        qkv,
        None,
        None,
        _fuse([attention.dense], linear),
        _norm(layer.post_attention_layernorm),
        _fuse([layer.mlp.dense_h_to_4h], linear),
        _fuse([layer.mlp.dense_4h_to_h], linear),
    )


def _norm(module: Any) -> Norm | None:
    if isinstance(module, nn.Identity):
        return None
    bias = getattr(module, "bias", None)
    eps = module.eps if bias is not None else module.variance_epsilon
    return Norm(module.weight.detach(), None if bias is None else bias.detach(), eps)


def _fuse(parts: Sequence[Any], linear: MakeLinear) -> Linear:
    def joined(tensors: list[Tensor]) -> Tensor:
        return tensors[0].detach() if len(tensors) == 1 else torch.cat(tensors).detach()

    bias = None if parts[0].bias is None else joined([part.bias for part in parts])
    made = linear(joined([part.weight for part in parts]), bias)
    for part in parts:
        _replaced(part.weight, made)
    return made


def _embedding(weight: Tensor, head: Linear, tied: bool) -> Callable[[Tensor], Tensor]:
    rows = PackedRows.of(head, weight) if tied and isinstance(head, PackedLinear) else None
    return rows or (lambda ids: functional.embedding(ids, weight))


def _replaced(weight: Tensor, made: Linear) -> None:
    """Give back the memory of a weight that was copied: what is mapped from a checkpoint would stay resident until
    the last weight of the file has gone.
    """
    if weight.device.type != "cpu" or (isinstance(made, PlainLinear) and made.weight.data_ptr() == weight.data_ptr()):
        return
    page, dont_need = mmap.PAGESIZE, getattr(mmap, "MADV_DONTNEED", None)
    first = -(-weight.data_ptr() // page) * page
    last = (weight.data_ptr() + weight.nbytes) // page * page
    if dont_need is not None and first < last and any(low <= first and last <= high for low, high in _mapped_files()):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), dont_need)


def _mapped_files() -> Iterator[tuple[int, int]]:
    """Addresses of the checkpoints mapped into this process; none where the system does not tell."""
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        if line.endswith(".safetensors"):
            low, high = line.split()[0].split("-")
            yield int(low, 16), int(high, 16)


def _retire(model: Any, decoder: Any) -> None:
    name = model.config.name_or_path or model.config.model_type

    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise ModelError(f"the weights of {name} now belong to a paceline target: load the model again to run it alone")

    model.to("meta")
    for part, method in ((model, "forward"), (model, "generate"), (decoder, "forward")):
        setattr(part, method, refuse)
