"""Llama's decoder layers in torch alone: what most heads are made of.

transformers' own give the same bits, but take seconds to import. Modules, weights and arguments have the names that
they have there, so that whatever reads, wraps or calls the one kind takes the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

#: Fields of a configuration that must have these values, and those that layers do not depend on.
_FIXED = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_FIXED |= {"attention_dropout": 0.0, "tie_word_embeddings": False}
_UNUSED = {"initializer_range", "pretraining_tp", "use_cache", "unk_token_id", "_model_name_or_path", "is_llama_config"}


@dataclass(kw_only=True)
class LlamaShape:
    """What layers depend on, and what else a target asks of a configuration; defaults are those of transformers."""

    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 0  # as many as there are heads
    head_dim: int = 0  # hidden_size / num_attention_heads
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any]
    vocab_size: int = 1

    model_type: ClassVar = "llama"
    hidden_act: ClassVar = "silu"
    name_or_path: ClassVar = ""
    tie_word_embeddings: ClassVar = False
    _attn_implementation: ClassVar = "sdpa"

    def __post_init__(self) -> None:
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> LlamaShape | None:
        """That of a configuration of transformers as a dictionary; None where it asks for anything else than this."""
        known = {field.name for field in fields(cls)}
        rope = config.get("rope_parameters") or {}
        plain = all(config.get(name, wanted) == wanted for name, wanted in _FIXED.items()) and "model_type" in config
        if not plain or config.keys() - known - _FIXED.keys() - _UNUSED or rope.keys() != {"rope_theta", "rope_type"}:
            return None
        numbers = {name: value for name, value in config.items() if name in known}
        return cls(**numbers) if rope["rope_type"] == "default" else None

    def get_text_config(self, **_: object) -> LlamaShape:
        return self

    @property
    def per_layer_config(self) -> list[LlamaShape]:
        """What transformers makes a cache of."""
        return [self] * self.num_hidden_layers


class LlamaNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden.dtype)


class LlamaRotary(nn.Module):
    """cos and sin of each position's angles, `[batch, tokens, head_dim]`, one half like the other."""

    inv_freq: Tensor
    rope_type, attention_scaling = "default", 1.0

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float) / shape.head_dim
        self.register_buffer("inv_freq", 1.0 / shape.rope_parameters["rope_theta"] ** exponents, persistent=False)

    @torch.no_grad()
    def forward(self, like: Tensor, position_ids: Int[Tensor, "batch tokens"]) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq.float()
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class LlamaAttention(nn.Module):
    def __init__(self, shape: LlamaShape, index: int) -> None:
        super().__init__()
        self.config, self.layer_idx = shape, index
        self.head_dim, self.scaling = shape.head_dim, shape.head_dim**-0.5
        size, queries = shape.hidden_size, shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        self.shared = shape.num_attention_heads // shape.num_key_value_heads  # query heads that share a key's
        self.q_proj, self.o_proj = nn.Linear(size, queries, bias=False), nn.Linear(queries, size, bias=False)
        self.k_proj, self.v_proj = nn.Linear(size, keys, bias=False), nn.Linear(size, keys, bias=False)

    def forward(
        self,
        hidden_states: Float[Tensor, "batch tokens hidden"],
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **_: object,
    ) -> tuple[Float[Tensor, "batch tokens hidden"], None]:
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        queries, keys, values = (project(hidden_states).view(heads).transpose(1, 2) for project in projections)
        cos, sin = (table.unsqueeze(1) for table in position_embeddings)
        queries, keys = (x * cos + turned(x) * sin for x in (queries, keys))
        if past_key_values is not None:
            keys, values = past_key_values.update(keys, values, self.layer_idx)
        if attention_mask is not None:  # with one torch has no fast kernel for keys that are shared
            keys, values = (x.repeat_interleave(self.shared, 1) for x in (keys, values))
        attended = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=attention_mask,
            scale=self.scaling,
            is_causal=attention_mask is None and queries.shape[2] > 1,
            enable_gqa=attention_mask is None and self.shared > 1,
        )
        out: Tensor = self.o_proj(attended.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1))
        return out, None


class LlamaMLP(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(size, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class LlamaLayer(nn.Module):
    def __init__(self, shape: LlamaShape, index: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = LlamaAttention(shape, index), LlamaMLP(shape.hidden_size, shape.intermediate_size)
        self.input_layernorm = LlamaNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = LlamaNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Float[Tensor, "batch tokens hidden"]:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **arguments)[0]
        out: Tensor = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return out


class LlamaDecoder(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens: nn.Module = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(shape, index) for index in range(shape.num_hidden_layers))
        self.norm, self.rotary_emb = LlamaNorm(shape.hidden_size, shape.rms_norm_eps), LlamaRotary(shape)

    def forward(
        self,
        inputs_embeds: Float[Tensor, "batch tokens hidden"],
        position_ids: Int[Tensor, "batch tokens"] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> SimpleNamespace:
        """`last_hidden_state`, after the norm.

        Args:
            position_ids: 0, 1, ... by default. Without a mask and a cache a text ends where they do not go on by one.
            attention_mask: 1 for tokens, 0 for padding, `[batch, tokens]`; or what is added to scores (or whether a
                key is seen), `[batch, 1, tokens, keys]`, which a cache needs.
            past_key_values: keys and values of tokens before, as transformers has them.
        """
        if position_ids is None:
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)[None]
        if attention_mask is None and past_key_values is None:
            attention_mask = _apart(position_ids)
        elif attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = _causal(attention_mask[:, None].bool())
        hidden, angles = inputs_embeds, self.rotary_emb(inputs_embeds, position_ids)
        for layer in self.layers:
            hidden = layer(
                hidden,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                position_embeddings=angles,
            )
        return SimpleNamespace(last_hidden_state=self.norm(hidden))


class LlamaLayers(nn.Module):
    """What of a causal language model the rest of paceline asks for; `model` and `lm_head` are its parts."""

    generation_config = None

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.config, self.model = shape, LlamaDecoder(shape)
        self.lm_head: nn.Module = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    def forward(self, inputs_embeds: Tensor, **arguments: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.lm_head(self.model(inputs_embeds, **arguments).last_hidden_state))

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def set_input_embeddings(self, module: nn.Module) -> None:
        self.model.embed_tokens = module

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, module: nn.Module) -> None:
        self.lm_head = module


def turned(x: Tensor) -> Tensor:
    """The halves of each head exchanged, and the first of them negative."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _causal(seen: Tensor) -> Tensor | None:
    """Who sees whom, `[batch, 1, tokens, tokens]`: of `seen`, `[batch, tokens or 1, tokens]`, what is not ahead; None:
    all of that.
    """
    if bool(seen.all()):
        return None
    size = seen.shape[-1]
    return (seen & torch.ones(size, size, dtype=torch.bool, device=seen.device).tril())[:, None]


def _apart(positions: Int[Tensor, "batch tokens"]) -> Tensor | None:
    """The mask of texts that stand one after another in a row."""
    text = (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    return _causal(text[:, :, None] == text[:, None])
