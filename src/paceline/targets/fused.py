"""A Hugging Face model's weights, taken over: fused, perhaps packed, and in one form for every family."""

from __future__ import annotations

import copy
import ctypes
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from paceline.errors import ModelError
from paceline.targets.described import check_described, refuse
from paceline.targets.experts import FusedExperts
from paceline.targets.linear import Linear, MakeLinear, PackedLinear, PackedRows, PlainLinear
from paceline.targets.parts import CLAMPED, LayerParts, ModelParts, Modules, Norm
from paceline.targets.rope import rotaries

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ACTIVATIONS = {True: ("silu", "gelu_tanh", CLAMPED), False: ("gelu",)}  # of gated MLPs, of the others


@dataclass
class FusedLayer:
    attention_norm: Norm | None  # None, here and below: what would be normed is taken as it is
    qkv: Linear  # rows: the heads' queries, then keys, then values
    query_norm: Norm | None  # of each head, or of all together
    key_norm: Norm | None
    out: Linear
    attention_post_norm: Norm | None
    mlp_norm: Norm | None
    up: Linear | None  # the gate's rows, then the others, where the MLP is gated; None: there are only experts
    down: Linear | None
    experts: FusedExperts | None
    mlp_post_norm: Norm | None
    sinks: Tensor | None  # [heads]
    rope: int  # which of `Weights.rotaries` rotates its heads; -1: none
    window: int  # tokens that a token sees, itself included; 0: all


@dataclass
class Shape:
    """What the arithmetic must know of a model besides its weights."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool  # activation(gate) * up; otherwise activation(up)
    activation: str
    parallel: bool  # attention and MLP both read the layer's input
    norm_whole: bool  # norms of queries and keys are of all heads together
    score_scale: float
    swiglu: tuple[float, float]  # alpha and limit of the clamped one
    score_cap: float  # cap * tanh(score / cap); 0: none
    residual_scale: float  # of what attention and MLP add


@dataclass
class Weights:
    shape: Shape
    embed: Callable[[Tensor], Tensor]
    layers: list[FusedLayer]
    norm: Norm | None
    head: Linear
    rotaries: list[Any]
    adjust: Callable[[Tensor], Tensor]  # what the output matrix gives becomes logits

    @property
    def linears(self) -> list[Linear]:
        return self._of_layers(lambda experts: experts.linears())

    @property
    def read(self) -> list[Linear]:
        """What a pass over one token reads: of experts, as many as it chooses."""
        return self._of_layers(lambda experts: experts.linears(experts.chosen))

    def _of_layers(self, of_experts: Callable[[FusedExperts], list[Linear]]) -> list[Linear]:
        found = [self.head]
        for layer in self.layers:
            found += [part for part in (layer.qkv, layer.out, layer.up, layer.down) if part]
            found += of_experts(layer.experts) if layer.experts else []
        return found


def check(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel, saying why, unless `absorb` can take this model over."""
    check_described(model, "torch")
    parts = ModelParts(model)
    family, config, layers = parts.family, parts.config, range(len(parts.decoder.layers))
    norms = [norm for index in layers for norm in parts.head_norms(index) if norm]
    refuse(
        "torch",
        {
            f"activation {getattr(config, family.activation)}": parts.activation not in ACTIVATIONS[family.gated],
            "norms of heads after the rotation, or with weights for each": any(
                family.norms_rotated or norm.centred or norm.weight.dim() != 1 for norm in norms
            ),
        },
    )


@torch.no_grad()
def absorb(model: PreTrainedModel, linear: MakeLinear) -> Weights:
    """Move the weights of a checked model into fused linears, layer by layer, freeing its own on the way.

    The model keeps its configuration; its forward and generate raise ModelError from now on.
    """
    parts = ModelParts(model)
    config, family, inputs, outputs = parts.config, parts.family, parts.inputs, parts.outputs
    head, scale = linear(outputs.weight.detach(), outputs.bias), parts.embedding_factor
    embed = _embedding(inputs.weight.detach(), head, tied=inputs.weight is outputs.weight)
    last = _norm(parts.norm, model.dtype)
    _replaced(outputs.weight, head)
    outputs.to("meta")
    if isinstance(embed, PackedRows):
        inputs.to("meta")
    layers = []
    for index in range(config.num_hidden_layers):
        layers.append(_fused_layer(parts.layer(index), linear, model.dtype, parts.routing))
        if family.by_head or family.interleaved:  # their rows were put into another order first
            for name in family.qkv:
                _replaced(getattr(getattr(parts.decoder.layers[index], family.attention), name).weight, layers[-1].qkv)
        parts.decoder.layers[index].to("meta")
    shape = Shape(
        hidden=config.hidden_size,
        heads=parts.heads,
        kv_heads=parts.kv_heads,
        head_dim=parts.head_dim,
        gated=family.gated,
        activation=parts.activation,
        parallel=parts.parallel,
        norm_whole=any(
            layer.query_norm is not None and len(layer.query_norm.weight) != parts.head_dim for layer in layers
        ),
        score_scale=parts.score_scale,
        swiglu=parts.swiglu,
        score_cap=family.cap(config, family.score_cap) or 0.0,
        residual_scale=family.number(config, family.residual_scale),
    )
    ropes = list(rotaries(copy.deepcopy(parts.decoder.rotary_emb)).values())
    scaled = embed if scale == 1.0 else lambda ids: embed(ids) * scale
    weights = Weights(shape, scaled, layers, last, head, ropes, lambda logits: family.adjusted(config, logits))
    _retire(model, parts.decoder)
    return weights


def _fused_layer(
    layer: LayerParts, linear: MakeLinear, dtype: torch.dtype, routing: tuple[int, bool] | None
) -> FusedLayer:
    experts = None
    if layer.experts and routing:
        router, up, down, gate = layer.experts
        ups, downs = ([_fuse(modules, linear) for modules in some] for some in (up, down))
        experts = FusedExperts(_fuse(router, linear), ups, downs, _fuse(gate, linear) if gate else None, *routing)
    return FusedLayer(
        _norm(layer.attention_norm, dtype),
        _fuse(layer.qkv, linear),
        _norm(layer.query_norm, dtype),
        _norm(layer.key_norm, dtype),
        _fuse(layer.out, linear),
        _norm(layer.attention_post_norm, dtype),
        _norm(layer.mlp_norm, dtype),
        _fuse(layer.up, linear) if layer.up else None,
        _fuse(layer.down, linear) if layer.down else None,
        experts,
        _norm(layer.mlp_post_norm, dtype),
        layer.sinks,
        layer.rope,
        layer.window,
    )


def _norm(norm: Norm | None, dtype: torch.dtype) -> Norm | None:
    if norm is None:
        return None
    weight = norm.weight.to(dtype)
    bias = torch.zeros_like(weight) if norm.centred and norm.bias is None else norm.bias
    return Norm(weight, bias, norm.eps, norm.centred)


def _fuse(modules: Modules, linear: MakeLinear) -> Linear:
    def joined(tensors: list[Tensor]) -> Tensor:
        return tensors[0].detach() if len(tensors) == 1 else torch.cat(tensors).detach()

    parts = list(modules.values())
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
