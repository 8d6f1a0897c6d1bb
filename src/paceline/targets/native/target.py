"""The native tier: the Llama family on CPU, by one C++ call per range of layers."""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from paceline.errors import UnsupportedModel
from paceline.targets.cache import CacheShape, KVCache
from paceline.targets.families import FAMILIES, LLAMA
from paceline.targets.native.build import library
from paceline.targets.native.memory import Arena
from paceline.targets.native.model import LayerWeights, NativeModel, Places, Sizes
from paceline.targets.native.storage import Storage
from paceline.targets.native.weights import Kind
from paceline.targets.plain_weights import check_plain
from paceline.targets.rope import RopeTables
from paceline.targets.target import Target, as_target

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paceline.targets.native.weights import Packed
    from paceline.targets.span import Span

MAX_HEAD_DIM = 256  # of attention.cpp
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # angles that depend on the position only


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
        UnsupportedModel: not of the Llama family, or with parts that the pass does not have.
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
        attention = model.model.layers[0].self_attn
        self._shape = CacheShape(self.num_layers, self.config.num_key_value_heads, attention.head_dim)
        self._rope = RopeTables(model.model.rotary_emb, self.dtype, self.device, self.context)
        self._norm = _norm(model.model.norm)
        self.native, self._embedding = self._pack(model, storage)
        self.weight_bytes = sum(matrix.bytes for matrix in self.native.matrices)

    # -- the block view --------------------------------------------------------------------------------------------
    def embed(self, span: Span) -> Float[Tensor, "batch width hidden"]:
        return self._embedding.rows(span.ids.flatten()).view(*span.ids.shape, -1)

    def layers(
        self,
        hidden: Tensor,
        span: Span,
        cache: KVCache,
        start: int,
        stop: int,
        skip: Collection[tuple[int, str]] = (),
    ) -> Float[Tensor, "batch width hidden"]:
        if span.end > cache.capacity:
            raise IndexError(f"the pass ends at slot {span.end} of a cache of {cache.capacity}")
        hidden = hidden.clone(memory_format=torch.contiguous_format)  # the pass works in place
        flags = bytes((i, part) in skip for i in range(start, stop) for part in ("attention", "mlp")) if skip else None
        self._rope.grow(span.end)
        flat, where = hidden.view(-1, hidden.shape[-1]), span.memo.get(self.context)
        if where is None:
            where = span.memo[self.context] = places(span, self.context)
        self.native.layers(flat, self._rope.cos, self._rope.sin, cache.store, where, start, stop, flags)
        return hidden

    def features(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        if self._norm is None:
            return hidden
        return functional.rms_norm(hidden, hidden.shape[-1:], self._norm, self.config.rms_norm_eps)

    def logits(self, features: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        return self._head(features, normed=True)

    def head(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        return self._head(hidden, normed=False)

    def _head(self, hidden: Tensor, normed: bool) -> Tensor:
        return self.native.head(hidden.reshape(-1, hidden.shape[-1]).contiguous(), normed).view(*hidden.shape[:-1], -1)

    def cache_shape(self) -> CacheShape:
        return self._shape

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        shape = self._shape
        size = (shape.layers, 2, batch, shape.kv_heads, capacity, shape.head_dim)
        memory = Arena().take(4 * prod(size))  # a cache of a long context streams like weights
        return KVCache(memory.view(torch.float32).view(size), np.zeros(batch, dtype=np.int64))

    # -- from the Hugging Face model -------------------------------------------------------------------------------
    def _pack(self, model: PreTrainedModel, mode: str) -> tuple[NativeModel, Packed]:
        config, decoder, shape = self.config, model.model, self._shape
        rounded, path = self.compute_dtype == torch.bfloat16, Path(config.name_or_path or "?", "source.gguf")
        source = path if path.is_file() and not rounded else None  # whose blocks are other weights than those rounded
        heads = {"q_proj": config.num_attention_heads, "k_proj": shape.kv_heads}
        storage = Storage(mode, source, self.num_layers, heads, Kind.BF16 if rounded else Kind.F32)
        layers = [_pack_layer(storage, f"model.layers.{i}", layer) for i, layer in enumerate(decoder.layers)]
        embed, head = decoder.embed_tokens, model.get_output_embeddings()
        tied = head.weight.data_ptr() == embed.weight.data_ptr() and head.bias is None
        embedding = storage.pack({"model.embed_tokens": embed})
        output = embedding if tied else storage.pack({"lm_head": head})
        if tied:
            head.weight = embed.weight  # both empty now
        sizes = Sizes(
            config.hidden_size,
            config.num_attention_heads,
            shape.kv_heads,
            shape.head_dim,
            config.intermediate_size,
            config.rms_norm_eps,
            decoder.layers[0].self_attn.scaling,
        )
        return NativeModel(sizes, layers, self._norm, output), embedding


def check_model(model: PreTrainedModel) -> None:
    """Raises UnsupportedModel for what this tier, or no tier, runs."""
    config = model.config.get_text_config()
    if FAMILIES.get(config.model_type) is not LLAMA:
        known = ", ".join(kind for kind, family in FAMILIES.items() if family is LLAMA)
        raise UnsupportedModel(f"the native tier runs {known}, not {config.model_type}")
    if as_target(model).layout:  # which refuses what no tier supports
        raise UnsupportedModel("the native tier does not support sliding windows: use the reference tier")
    attention, rope = model.model.layers[0].self_attn, model.model.rotary_emb.rope_type
    for fits, what in (
        (config.hidden_act == "silu", f"activation {config.hidden_act}"),
        (rope in STATIC_ROPE, f"rope type {rope}"),
        (attention.head_dim <= MAX_HEAD_DIM and attention.head_dim % 2 == 0, f"head size {attention.head_dim}"),
        (model.device.type == "cpu", f"device {model.device}"),
        (model.dtype != torch.float64, "float64 (it computes in float32)"),
    ):
        if not fits:
            raise UnsupportedModel(f"the native tier does not support {what}")
    check_plain(model)


def _pack_layer(storage: Storage, name: str, layer: Any) -> LayerWeights:
    def named(owner: str, *parts: str) -> dict[str, nn.Linear]:
        return {f"{name}.{owner}.{part}": getattr(getattr(layer, owner), part) for part in parts}

    return LayerWeights(
        qkv=storage.pack(named("self_attn", "q_proj", "k_proj", "v_proj")),
        out=storage.pack(named("self_attn", "o_proj")),
        gate_up=storage.pack(named("mlp", "gate_proj", "up_proj"), interleaved=True),
        down=storage.pack(named("mlp", "down_proj")),
        attention_norm=_norm(layer.input_layernorm),
        mlp_norm=_norm(layer.post_attention_layernorm),
        query_norm=_norm(getattr(layer.self_attn, "q_norm", None)),
        key_norm=_norm(getattr(layer.self_attn, "k_norm", None)),
    )


def _norm(module: Any) -> Float[Tensor, " size"] | None:
    return None if module is None or isinstance(module, nn.Identity) else module.weight.detach().float()


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
