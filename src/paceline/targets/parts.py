"""The weights of a model's layers by what they are, as its `Family` says where they lie: what the fast tiers read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from paceline.targets.context import context_of
from paceline.targets.families import FAMILIES, embedding_factor
from paceline.targets.layout import layer_windows
from paceline.targets.linear import linear_module
from paceline.targets.rope import rotaries

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: By transformers' names: what lies between an MLP's matrices.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}
CLAMPED = "clamped_swiglu"  # of experts that say so
OLMO_EPSILON = 1e-5  # of layer norms that have neither weights nor a number of their own

Pair = tuple[Tensor, Tensor] | tuple[None, None]
Modules = dict[str, nn.Linear]  # by their names in the checkpoint


@dataclass
class Norm:
    """x / rms(x) * weight + bias; of a `centred` one (a layer norm) the mean is taken off x first."""

    weight: Float[Tensor, "*heads size"]
    bias: Float[Tensor, "*heads size"] | None
    eps: float
    centred: bool = False


class ExpertParts(NamedTuple):
    router: Modules
    gate_up: list[Modules]  # of each expert
    down: list[Modules]
    shared_gate: Modules | None


class LayerParts(NamedTuple):
    """A decoder layer. A matrix is one module or several whose rows belong below one another: `qkv`'s are queries,
    keys and values, `up`'s the gate and what it multiplies, where there is a gate.

    Attributes:
        up: None: there are experts and no MLP beside them.
        sinks: `[heads]`, what takes a share of the softmax as one more score would.
        rope: by which of the model's `rotaries` queries and keys are rotated; -1: by none.
        window: how many tokens a token sees, itself included; 0: all before it.
    """

    qkv: Modules
    out: Modules
    up: Modules | None
    down: Modules | None
    experts: ExpertParts | None
    attention_norm: Norm | None  # None, here and below: what would be normed is taken as it is
    attention_post_norm: Norm | None
    mlp_norm: Norm | None
    mlp_post_norm: Norm | None
    query_norm: Norm | None  # of each head, [head_dim] or [heads, head_dim]; or of all together, [heads * head_dim]
    key_norm: Norm | None
    sinks: Float[Tensor, " heads"] | None
    rope: int
    window: int


class ModelParts:
    """A model that `check_described` lets through, part by part. What it hands out are the model's own tensors where
    they can be: with interleaved rotation, rows of queries and keys are copies in the order of halves.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.config: Any = model.config.get_text_config()
        self.family = family = FAMILIES[self.config.model_type]
        self.decoder: Any = getattr(model, family.decoder)
        self.inputs: Any = model.get_input_embeddings()
        self.outputs: Any = model.get_output_embeddings()
        self.device = model.device
        attention: Any = getattr(self.decoder.layers[0], family.attention) if len(self.decoder.layers) else None
        self.heads: int = self.config.num_attention_heads
        config_dim = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.heads
        self.head_dim: int = config_dim if attention is None else head_size(attention)
        self.kv_heads: int = getattr(self.config, "num_key_value_heads", None) or self.heads
        if attention is not None:  # not every family has what its configuration may be given
            rows = sum(getattr(attention, name).out_features for name in family.qkv)
            self.kv_heads = (rows // self.head_dim - self.heads) // 2
        self.score_scale: float = self.head_dim**-0.5 if attention is None else attention.scaling
        self.activation = ACTIVATIONS[getattr(self.config, family.activation)]
        self.swiglu = (0.0, 0.0)  # alpha and limit of the clamped one
        if family.experts and family.experts.clamped:
            self.activation, self.swiglu = CLAMPED, (self.config.swiglu_alpha, self.config.swiglu_limit)
        described = family.experts
        self.routing: tuple[int, bool] | None = None  # experts of a token; whether their weights sum to 1
        if described:
            normalised = bool(getattr(self.config, described.normalised or "", True))
            self.routing = (self.config.num_experts_per_tok, normalised)
        self.parallel = family.is_parallel(self.config)
        self.embedding_factor = embedding_factor(model)
        self.rotaries = rotaries(self.decoder.rotary_emb)  # of one size
        self.rotary: int = 2 * next(iter(self.rotaries.values())).inv_freq.numel()  # dimensions of a head
        self.windows = layer_windows(model, context_of(self.config)) or []

    @property
    def norm(self) -> Norm | None:
        """The last one."""
        return self._norm(self.decoder, self.family.norm)

    def layer(self, index: int) -> LayerParts:
        family, layer = self.family, self.decoder.layers[index]
        name = f"{family.decoder}.layers.{index}"
        attention, mlp = getattr(layer, family.attention), getattr(layer, family.mlp)
        experts = mlp if family.experts and hasattr(mlp, family.experts.experts) else None
        dense, at = mlp, f"{name}.{family.mlp}"
        if family.experts and experts is not None:  # the MLP beside them, if there is one
            dense, at = getattr(mlp, family.experts.shared or "", None), f"{at}.{family.experts.shared}"
        attention_norm = self._norm(layer, family.attention_norm)
        mlp_norm = self._norm(layer, family.mlp_norm)
        return LayerParts(
            self._qkv(attention, f"{name}.{family.attention}"),
            _named(f"{name}.{family.attention}", attention, [family.out]),
            None if dense is None else self._up(dense, at),
            None if dense is None else _named(at, dense, [family.down]),
            None if experts is None else self._experts(experts, f"{name}.{family.mlp}"),
            attention_norm,
            self._norm(layer, family.attention_post_norm),
            attention_norm if mlp_norm is None and self.parallel else mlp_norm,
            self._norm(layer, family.mlp_post_norm),
            *self.head_norms(index),
            None if (sinks := getattr(attention, family.sinks, None)) is None else sinks.detach(),
            self.rope(index),
            self.windows[index],
        )

    def head_norms(self, index: int) -> tuple[Norm | None, Norm | None]:
        """Of the queries and of the keys."""
        attention = getattr(self.decoder.layers[index], self.family.attention)
        names = ((self.family.query_norm, self.heads), (self.family.key_norm, self.kv_heads))
        queries, keys = (self._head_norm(attention, name, heads) for name, heads in names)
        return queries, keys

    def rope(self, index: int) -> int:
        if not self.family.rotates(getattr(self.decoder.layers[index], self.family.attention)):
            return -1
        return list(self.rotaries).index("" if "" in self.rotaries else self.config.layer_types[index])

    # -- projections -----------------------------------------------------------------------------------------------
    def _qkv(self, attention: Any, name: str) -> Modules:
        modules = _named(name, attention, self.family.qkv)
        size = self.head_dim
        if self.family.by_head:  # [heads, (q, k, v), head_dim] -> [(q, k, v), heads, head_dim]
            return {
                key: _map_rows(module, lambda rows: rows.view(-1, 3, size, *rows.shape[1:]).transpose(0, 1))
                for key, module in modules.items()
            }
        if self.family.interleaved:
            queries, keys, values = modules.items()
            turned = (_map_rows(module, self._halves) for _, module in (queries, keys))
            return dict(zip(modules, (*turned, values[1]), strict=True))
        return modules

    def _halves(self, rows: Tensor) -> Tensor:
        """Each head's rotated rows, pair by pair in the checkpoint, as two halves. Scores stay what they are."""
        rotary = self.rotary
        heads = rows.unflatten(0, (-1, self.head_dim))
        pairs = heads[:, :rotary].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return torch.cat([pairs, heads[:, rotary:]], 1)

    def _up(self, mlp: Any, name: str) -> Modules:
        modules = _named(name, mlp, self.family.up)
        if len(modules) == 1 and self.family.gated:
            ((key, module),) = modules.items()
            return _pair(key, _halves(module.weight), _halves(module.bias))
        return modules

    def _experts(self, mlp: Any, name: str) -> ExpertParts:
        described = self.family.experts
        assert described is not None
        experts, router = getattr(mlp, described.experts), getattr(mlp, described.router)
        at, gate = f"{name}.{described.experts}", described.shared_gate
        count, halves = len(experts.down_proj), _turns if described.transposed else _halves
        ups, downs = (
            weights.mT if described.transposed else weights for weights in (experts.gate_up_proj, experts.down_proj)
        )
        up_biases, down_biases = (
            getattr(experts, f"{which}_proj_bias", [None] * count) for which in ("gate_up", "down")
        )
        return ExpertParts(
            {f"{name}.{described.router}": linear_module(router.weight, getattr(router, "bias", None))},
            [_pair(f"{at}.{i}.gate_up", halves(ups[i]), halves(up_biases[i])) for i in range(count)],
            [{f"{at}.{i}.down": _linear(downs[i], down_biases[i])} for i in range(count)],
            _named(name, mlp, [gate]) if gate else None,
        )

    # -- norms -----------------------------------------------------------------------------------------------------
    def _norm(self, owner: Any, name: str | None) -> Norm | None:
        module = getattr(owner, name, None) if name else None
        if module is None or isinstance(module, nn.Identity):
            return None
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", OLMO_EPSILON))
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if weight is None:
            weight = torch.ones(module.normalized_shape, device=self.device)
        elif self.family.norm_offset:
            weight = weight.detach().float() + self.family.norm_offset
        centred = "LayerNorm" in type(module).__name__
        return Norm(weight.detach(), None if bias is None else bias.detach(), eps, centred)

    def _head_norm(self, attention: Any, name: str, heads: int) -> Norm | None:
        norm = self._norm(attention, name)
        if norm is None or not self.family.interleaved:
            return norm
        # The weights go the way of the rows that they multiply.
        wide = norm.weight.expand(heads, self.head_dim).flatten()
        return Norm(self._halves(wide).view(heads, self.head_dim), None, norm.eps, norm.centred)


def head_size(attention: Any) -> int:
    size: int = getattr(attention, "head_dim", None) or attention.head_size
    return size


def _named(owner: str, module: Any, names: Sequence[str]) -> Modules:
    return {f"{owner}.{name}": getattr(module, name) for name in names}


def _halves(rows: Tensor | None) -> Pair:
    """A gate's rows and those of what it multiplies, below one another in one matrix."""
    return (None, None) if rows is None else (rows[: len(rows) // 2], rows[len(rows) // 2 :])


def _turns(rows: Tensor | None) -> Pair:
    """The same where they take turns."""
    return (None, None) if rows is None else (rows[::2], rows[1::2])


def _pair(name: str, weights: Pair, biases: Pair) -> Modules:
    parts = zip(("gate", "up"), weights, biases, strict=True)
    return {f"{name}.{part}": _linear(rows, some) for part, rows, some in parts}


def _linear(weight: Tensor | None, bias: Tensor | None) -> nn.Linear:
    assert weight is not None
    return linear_module(weight.detach(), None if bias is None else bias.detach())


def _map_rows(module: nn.Linear, order: Callable[[Tensor], Tensor]) -> nn.Linear:
    def moved(rows: Tensor) -> Tensor:
        return order(rows.detach()).reshape(rows.shape)

    return linear_module(moved(module.weight), None if module.bias is None else moved(module.bias))
