"""The native tier: the model families of the table on CPU, by one C++ call per range of layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from paceline.errors import OptionError
from paceline.targets.cache import CacheShape, KVCache
from paceline.targets.described import check_described, refuse
from paceline.targets.native.build import library
from paceline.targets.native.memory import Arena
from paceline.targets.native.model import ACTIVATIONS, ExpertWeights, LayerWeights, NativeModel, Places, Sizes
from paceline.targets.native.storage import Storage
from paceline.targets.native.weights import BLOCK, Kind
from paceline.targets.parts import ExpertParts, LayerParts, ModelParts, Norm
from paceline.targets.rope import RopeTables
from paceline.targets.sliding import fitting_cache
from paceline.targets.target import Target, check_supported

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paceline.targets.native.weights import Packed
    from paceline.targets.span import Span

MAX_HEAD_DIM = 256  # of attention.cpp


class NativeTarget(Target):
    """Packs the model's weights and takes them away from it. Computes in float32; for a model in bfloat16 the matrix
    products round their inputs to it, as Hugging Face's do, and only those: sums, norms, attention and the residual
    stream stay in float32.

    A token's result has the same bits whatever stands beside it in the pass, and with any number of threads: greedy
    speculative decoding is then plain decoding, bit for bit.

    Args:
        storage: see `Storage`.

    Raises:
        NativeUnavailable: the C++ code cannot be built here.
        UnsupportedModel: not of a known family, or with parts that the pass does not have.
        OptionError: unknown storage, or one that needs a GGUF file.
    """

    tier = "native"
    exact = True
    exactness = "every sum has one fixed order"

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, storage: str = "auto"
    ) -> None:
        super().__init__(model, tokenizer)
        check_model(model)  # before anything is compiled for a model that cannot run
        library()
        self.dtype = torch.float32
        self.compute_dtype = torch.bfloat16 if model.dtype == torch.bfloat16 else torch.float32
        parts = ModelParts(model)
        self._shape = CacheShape(self.num_layers, parts.kv_heads, parts.head_dim)
        self._ropes = [RopeTables(rotary, self.dtype, self.device, self.context) for rotary in parts.rotaries.values()]
        self._scale, self._norm = parts.embedding_factor, _float(parts.norm)
        self.native, self._embedding = self._pack(parts, storage)
        self.weight_bytes = sum(matrix.bytes for matrix in self.native.read)
        if self.native.sizes.experts:
            self.weight_count = sum(matrix.outputs * matrix.c.inputs for matrix in self.native.read)

    def in_int8(self) -> NativeTarget:
        """This target, whose matrix products with weights in blocks round their inputs to 8 bits from now on.

        Raises:
            OptionError: no weights are in blocks.
        """
        if self.compute_dtype != torch.float32 or not self.native.round_inputs():
            raise OptionError(f"int8 is for models with weights in blocks, from a GGUF file: {self.name} has none")
        self.compute_dtype = torch.int8
        return self

    @property
    def windows(self) -> list[int]:
        return self.native.windows

    @windows.setter
    def windows(self, windows: Sequence[int]) -> None:
        self.native.windows = windows

    # -- the block view --------------------------------------------------------------------------------------------
    def embed(self, span: Span) -> Float[Tensor, "batch width hidden"]:
        rows = self._embedding.rows(span.ids.flatten()).view(*span.ids.shape, -1)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)

    def layers(
        self,
        hidden: Tensor,
        span: Span,
        cache: KVCache,
        start: int,
        stop: int,
        skip: Collection[tuple[int, str]] = (),
        beside: Tensor | None = None,
        taps: Mapping[int, Tensor] | None = None,
    ) -> Float[Tensor, "batch width hidden"]:
        """See `Target.layers`. `taps` is filled with what enters these layers, above `start` and up to `stop`."""
        cache.place(span)
        hidden = hidden.clone(memory_format=torch.contiguous_format)  # the pass works in place
        flags = bytes((i, part) in skip for i in range(start, stop) for part in ("attention", "mlp")) if skip else None
        for rope in self._ropes:
            rope.grow(span.end)
        flat, where = hidden.view(-1, hidden.shape[-1]), span.memo.get(self.context)
        if where is None:
            where = span.memo[self.context] = places(span, self.context)
        other = None if beside is None else beside.reshape(flat.shape).contiguous()
        self.native.layers(flat, self._ropes, cache.addresses, where, start, stop, flags, other, taps)
        return hidden

    def _layers_tapped(
        self, hidden: Tensor, span: Span, cache: KVCache, start: int, taps: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """In one call: what is tapped is copied on the way."""
        tapped = {tap: hidden if tap == start else torch.empty(hidden.shape) for tap in taps}
        return self.layers(hidden, span, cache, start, self.num_layers, taps=tapped), tapped

    def features(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        norm, size = self._norm, (hidden.shape[-1],)
        if norm is None:
            return hidden
        if norm.centred:
            return functional.layer_norm(hidden, size, norm.weight, norm.bias, norm.eps)
        return functional.rms_norm(hidden, size, norm.weight, norm.eps)

    def logits(self, features: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        return self._head(features, normed=True)

    def head(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        return self._head(hidden, normed=False)

    def _head(self, hidden: Tensor, normed: bool) -> Tensor:
        return self.native.head(hidden.reshape(-1, hidden.shape[-1]).contiguous(), normed).view(*hidden.shape[:-1], -1)

    def cache_shape(self) -> CacheShape:
        return self._shape

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        def zeros(size: Sequence[int]) -> Tensor:  # a cache of a long context streams like weights
            return Arena().take(4 * prod(size)).view(torch.float32).view(size)

        return fitting_cache(self._shape, self.windows, batch, capacity, zeros)

    # -- from the Hugging Face model -------------------------------------------------------------------------------
    def _pack(self, parts: ModelParts, mode: str) -> tuple[NativeModel, Packed]:
        family, rounded = parts.family, self.compute_dtype == torch.bfloat16
        path = Path(self.config.name_or_path or "?", "source.gguf")
        source = path if path.is_file() and not rounded else None  # whose blocks are other weights than those rounded
        heads = {"q_proj": parts.heads, "k_proj": parts.kv_heads}
        storage = Storage(mode, source, self.num_layers, heads, Kind.BF16 if rounded else Kind.F32)
        layers = []
        for index in range(self.num_layers):
            layers.append(_pack_layer(storage, parts.layer(index), parts.family.gated))
            _release(parts.decoder.layers[index])
        embed, head = parts.inputs, parts.outputs
        tied = head.weight.data_ptr() == embed.weight.data_ptr() and head.bias is None
        embedding = storage.pack({f"{family.decoder}.{family.embed}": embed})
        output = embedding if tied else storage.pack({"lm_head": head})
        if tied:
            head.weight = embed.weight  # both empty now
        sizes = _sizes(parts, layers)
        return NativeModel(sizes, layers, self._norm, output), embedding


def check_model(model: PreTrainedModel) -> None:
    """Raises UnsupportedModel for what this tier, or no tier, runs."""
    check_described(model, "native")
    check_supported(model)
    parts = ModelParts(model)
    size, rotary = parts.head_dim, parts.rotary
    refuse(
        "native",
        {
            f"head size {size}, of it {rotary} rotated": size > MAX_HEAD_DIM or size % 2 or rotary > size,
            f"device {model.device}": model.device.type != "cpu",
            "float64 (it computes in float32)": model.dtype == torch.float64,
        },
    )


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


def places(span: Span, context: int) -> Places:
    """Where the tokens of a span stand, row after row."""
    batch, width = span.batch, span.width
    starts = span.starts.astype(np.int32)
    row = np.repeat(np.arange(batch, dtype=np.int32), width)
    slot = (starts[:, None] + np.arange(span.offset, span.offset + width, dtype=np.int32)).ravel()
    position = slot if span.depths is None else starts[row] + span.depths.numpy().astype(np.int32).ravel()
    position = np.minimum(position, context - 1)  # padding nodes may lie behind the context's end
    extra_start = np.zeros(len(row) + 1, np.int32)
    if span.ancestors is None:
        return Places(position, row, slot, slot + np.int32(1), extra_start, slot)
    seen = span.ancestors.numpy().reshape(batch * width, -1)
    token, node = np.nonzero(seen)
    np.cumsum(seen.sum(1), out=extra_start[1:])
    return Places(position, row, slot, starts[row], extra_start, starts[row[token]] + node.astype(np.int32))
