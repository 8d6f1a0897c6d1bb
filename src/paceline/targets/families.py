"""What model families are: where they keep their parts, and what these compute beyond Llama's.

A family is a description, which every tier reads: the reference tier calls the parts by it (`run_sublayers`), the fast
tiers read weights by it (`parts.py`) and refuse what it does not cover. A new family is a line of `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in the MLP's place. Layers whose MLP has no `experts` are dense.

    The router's softmax over all experts gives their weights, of which the largest `num_experts_per_tok` count.
    """

    router: str = "gate"
    experts: str = "experts"  # `gate_up_proj` and `down_proj`: three-dimensional, experts first
    normalised: str | None = None  # in the config: whether those weights are made to sum to 1; None: they are
    shared: str | None = None  # an MLP that all tokens pass besides
    shared_gate: str | None = None  # its weight, before a sigmoid
    transposed: bool = False  # their matrices have inputs before outputs, and outputs of gate and up by turns
    clamped: bool = False  # (up + 1) * gate * sigmoid(alpha * gate), of values clamped at the config's `swiglu_limit`


@dataclass(frozen=True)
class Family:
    """Attribute names of a `...ForCausalLM`, of its decoder layers, and of its configuration.

    Norms are RMS norms unless their modules are called layer norms; what rotates and by how much, head sizes, biases,
    the scale of attention scores and whether there are norms of heads is read off the modules.
    """

    # The model.
    decoder: str = "model"
    embed: str = "embed_tokens"
    norm: str = "norm"
    cache_argument: str = "past_key_values"
    # A layer: attention(attention_norm(x)), the same of the MLP; each result through its post-norm, if there is one.
    attention: str = "self_attn"
    mlp: str = "mlp"
    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"  # where a parallel layer has none, the attention's serves both
    mlp_post_norm: str | None = None
    parallel: bool | str = False  # attention and MLP both read the layer's input; a name: where the config says so
    norm_offset: float = 0.0  # norms multiply by this plus their weight
    # Projections. One name where several could be: a matrix of all their rows, in this order.
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    by_head: bool = False  # that one matrix has the query, key and value rows of a head together
    out: str = "o_proj"
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    gated: bool = True  # activation(gate) * up; otherwise activation(up)
    down: str = "down_proj"
    # Heads.
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    norms_rotated: bool = False  # these norms come after the rotation, not before it
    sinks: str = "sinks"  # a score of each head, which takes its share of the softmax and adds no value
    rotates: Callable[[Any], bool] = lambda attention: bool(getattr(attention, "use_rope", True))  # this layer's heads
    interleaved: bool = False  # the rotation pairs neighbouring dimensions, not the halves
    # Names in the config.
    activation: str = "hidden_act"
    embedding_scale: str | None = None  # factors
    scaled_embedding: bool = False  # the embedding's module has one of its own, besides
    residual_scale: str | None = None  # of what attention and MLP add
    logit_scale: str | None = None
    logit_divisor: str | None = None
    score_cap: str | None = None  # cap * tanh(x / cap), of attention scores; None there: no cap
    logit_cap: str | None = None
    without: tuple[str, ...] = ()  # settings that the fast tiers do not have: they must be off
    # Others.
    experts: Experts | None = None
    uniform: bool = True  # all layers are made alike

    def is_parallel(self, config: Any) -> bool:
        return bool(getattr(config, self.parallel)) if isinstance(self.parallel, str) else self.parallel

    def number(self, config: Any, name: str | None) -> float:
        """A factor of the config; 1 where the family has none."""
        return 1.0 if name is None else float(getattr(config, name))

    def cap(self, config: Any, name: str | None) -> float | None:
        return None if name is None else getattr(config, name)

    def logits_factor(self, config: Any) -> float:
        return self.number(config, self.logit_scale) / self.number(config, self.logit_divisor)

    def adjusted(self, config: Any, logits: Tensor) -> Tensor:
        """Logits from what the output matrix gives."""
        if self.logit_divisor:
            logits = logits / getattr(config, self.logit_divisor)
        if self.logit_scale:
            logits = logits * getattr(config, self.logit_scale)
        if cap := self.cap(config, self.logit_cap):
            logits = (logits / cap).tanh() * cap
        return logits

    def of_layers(self) -> dict[str, object]:
        """Values in a config that leave out what is done before the layers and after the output matrix."""
        factors = (self.embedding_scale, self.logit_scale, self.logit_divisor)
        return {name: 1.0 for name in factors if name} | ({self.logit_cap: None} if self.logit_cap else {})


LLAMA = Family()
FUSED = Family(qkv=("qkv_proj",), up=("gate_up_proj",))  # of Phi-3
GLM = Family(up=("gate_up_proj",), interleaved=True)
SANDWICH: dict[str, Any] = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
POST: dict[str, Any] = {**SANDWICH, "attention_norm": None, "mlp_norm": None}
GEMMA = Family(norm_offset=1.0, scaled_embedding=True, without=("use_bidirectional_attention",))
GEMMA_3 = replace(GEMMA, **SANDWICH, activation="hidden_activation", logit_cap="final_logit_softcapping")
GRANITE = Family(
    embedding_scale="embedding_multiplier", residual_scale="residual_multiplier", logit_divisor="logits_scaling"
)
ONE_NORM: dict[str, Any] = {"mlp_norm": None, "parallel": True}
UNGATED: dict[str, Any] = {"up": ("up_proj",), "gated": False}
COHERE = Family(**ONE_NORM, interleaved=True, logit_scale="logit_scale")
#: Lists in a configuration that have an entry for each layer.
OF_LAYERS = ("layer_types", "no_rope_layers")

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,  # and SmolLM, SmolLM2, TinyLlama, Vicuna, ...
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "seed_oss": LLAMA,
    "arcee": replace(LLAMA, **UNGATED),
    "cohere": COHERE,
    "ernie4_5": Family(interleaved=True),
    "cohere2": replace(COHERE, rotates=lambda attention: attention.sliding_window is not None),
    "exaone4": Family(**POST, rotates=lambda attention: attention.sliding_window is None or attention.is_sliding),
    "gemma": GEMMA,
    "gemma2": replace(GEMMA_3, score_cap="attn_logit_softcapping"),
    "gemma3_text": GEMMA_3,
    "glm": GLM,
    "glm4": replace(GLM, attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm"),
    "gpt_neox": Family(  # Pythia
        decoder="gpt_neox",
        embed="embed_in",
        norm="final_layer_norm",
        attention="attention",
        cache_argument="layer_past",
        parallel="use_parallel_residual",
        qkv=("query_key_value",),
        by_head=True,
        out="dense",
        up=("dense_h_to_4h",),
        gated=False,
        down="dense_4h_to_h",
    ),
    "granite": GRANITE,
    "helium": Family(interleaved=True),
    "hunyuan_v1_dense": Family(query_norm="query_layernorm", key_norm="key_layernorm", norms_rotated=True),
    "nemotron": Family(norm_offset=1.0, **UNGATED),
    "olmo": Family(without=("clip_qkv",)),
    "olmo2": Family(**POST),
    "olmo3": Family(**POST),
    "phi": Family(
        norm="final_layernorm",
        **ONE_NORM,
        out="dense",
        up=("fc1",),
        gated=False,
        down="fc2",
        query_norm="q_layernorm",
        key_norm="k_layernorm",
    ),
    "phi3": FUSED,
    "smollm3": Family(uniform=False),
    "stablelm": Family(parallel="use_parallel_residual"),
    "starcoder2": Family(up=("c_fc",), gated=False, down="c_proj"),
    "granitemoe": replace(GRANITE, mlp="block_sparse_moe", experts=Experts(router="router")),
    "gpt_oss": Family(experts=Experts(router="router", transposed=True, clamped=True)),
    "mixtral": Family(experts=Experts()),
    "olmoe": Family(experts=Experts(normalised="norm_topk_prob"), without=("clip_qkv",)),
    "qwen2_moe": Family(
        experts=Experts(normalised="norm_topk_prob", shared="shared_expert", shared_gate="shared_expert_gate"),
        uniform=False,
    ),
    "qwen3_moe": Family(experts=Experts(normalised="norm_topk_prob"), uniform=False),
}


def embedding_factor(model: Any) -> float:
    """What a row of the embedding is multiplied by before the first layer, as the model rounds it."""
    config, inputs = model.config.get_text_config(), model.get_input_embeddings()
    family = FAMILIES[config.model_type]
    own = inputs.scalar_embed_scale if family.scaled_embedding and hasattr(inputs, "scalar_embed_scale") else 1.0
    return torch.tensor(own * family.number(config, family.embedding_scale), dtype=inputs.weight.dtype).item()


def embedding_matrix(model: Any) -> Tensor:
    """The rows that enter the first layer; the model's own where they enter as they are."""
    weight: Tensor = model.get_input_embeddings().weight.detach()
    factor = embedding_factor(model)
    return weight if factor == 1.0 else weight * factor


def output_matrix(model: Any) -> Tensor:
    """The matrix that makes logits of features (but for a bias or a cap); the model's own where that does it."""
    weight: Tensor = model.get_output_embeddings().weight.detach()
    factor = FAMILIES[model.config.model_type].logits_factor(model.config.get_text_config())
    return weight if factor == 1.0 else weight * factor


class Adjustment(NamedTuple):
    """What makes a model's logits of the products with its `output_matrix`.

    Attributes:
        bias: what is added, for all tokens.
        cap: see `Family.logit_cap`.
    """

    bias: Tensor | None = None
    cap: float | None = None

    @classmethod
    def of(cls, model: Any) -> Adjustment:
        family, config = FAMILIES[model.config.model_type], model.config.get_text_config()
        bias = getattr(model.get_output_embeddings(), "bias", None)
        factor = family.logits_factor(config)
        return cls(None if bias is None else bias.detach() * factor, family.cap(config, family.logit_cap))

    def __call__(self, products: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Logits of `tokens`; None: of all."""
        if self.bias is not None:
            bias = self.bias if tokens is None else self.bias[tokens.to(self.bias.device)]
            products = products + bias.to(products)
        return products if not self.cap else (products / self.cap).tanh() * self.cap


AS_IT_IS = Adjustment()


def run_sublayers(
    family: Family, layer: Any, hidden: Tensor, attention: bool, mlp: bool, **arguments: object
) -> Tensor:
    """A decoder layer with its attention or MLP sublayer left out (the residual passes by it).

    For a layer that runs whole call the layer itself; this is for layer-skipping drafts.
    """

    def sublayer(compute: Callable[[Tensor], Any], before: str | None, after: str | None, x: Tensor) -> Tensor:
        out: Any = compute(getattr(layer, before)(x) if before else x)
        out = out[0] if isinstance(out, tuple) else out  # beside it attention's weights, or a router's
        result: Tensor = getattr(layer, after)(out) if after else out
        return result * getattr(layer, family.residual_scale) if family.residual_scale else result

    def attend(x: Tensor) -> Tensor:
        def compute(normed: Tensor) -> Any:
            return getattr(layer, family.attention)(normed, **arguments)

        return sublayer(compute, family.attention_norm, family.attention_post_norm, x)

    def transform(x: Tensor) -> Tensor:
        norm = family.mlp_norm
        if parallel and (norm is None or getattr(layer, norm) is None):
            norm = family.attention_norm
        return sublayer(getattr(layer, family.mlp), norm, family.mlp_post_norm, x)

    parallel = family.parallel if isinstance(family.parallel, bool) else getattr(layer, family.parallel)
    entered = hidden
    if attention:
        hidden = hidden + attend(entered)
    return hidden + transform(entered if parallel else hidden) if mlp else hidden
