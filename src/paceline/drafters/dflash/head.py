"""DFlash's head (Chen, Liang and Liu, 2026): a small decoder that fills in a block of tokens in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from paceline.drafting.heads import HeadConfig, as_ids, with_blocks
from paceline.drafting.sharing_head import SharingHead
from paceline.errors import require
from paceline.targets.families import Adjustment, embedding_matrix, output_matrix
from paceline.targets.identity import model_key, probe_features
from paceline.targets.llama_layers import LlamaMLP, LlamaNorm, LlamaRotary, LlamaShape, turned
from paceline.targets.reference import as_target
from paceline.targets.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OWN, OF_TARGET = "own", "target"
MOST = 64  # tokens of a block


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(HeadConfig):
    """What a DFlash head is.

    Attributes:
        layers: K, decoder layers.
        taps: which hidden states of the target it reads, in the order in which `fc` has them: n is what enters layer n;
            the number of layers, what leaves the last.
        block: tokens of a block, the known one at its beginning included.
        mask: the token that stands for those that are not known.
        from_known: whether each place tells the token after it, that of the known token the first one. Else the place
            of a mask tells the token there.
        causal: by layer, whether a token sees only those of the block that do not come after it.
        windows: by layer, how many tokens it sees at most, its own included; 0: all.
        bias: whether the projections of attention have one.
        output: "target": the target's output matrix, not stored; "own": one of the head's own.
        shape: `hidden_size`, `intermediate_size`, `num_attention_heads`, `num_key_value_heads`, `head_dim`,
            `max_position_embeddings`, `rms_norm_eps` and `rope_parameters`, as transformers has them for Llama.
    """

    layers: int = 1
    taps: list[int]
    block: int
    mask: int
    from_known: bool = False
    causal: list[bool] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)
    bias: bool = False
    output: str = OF_TARGET
    shape: dict[str, Any]

    def __post_init__(self) -> None:
        require(self.layers >= 1, f"a DFlash head has K = 1 layer or more, not {self.layers}")
        taps_fit = bool(self.taps) and min(self.taps) >= 0 and len(set(self.taps)) == len(self.taps)
        require(taps_fit, f"taps must be numbers of layers, each once, not {self.taps}")
        require(self.mask >= 0, f"the mask is a token, not {self.mask}")
        require(2 <= self.block <= MOST, f"a block has 2 .. {MOST} tokens, not {self.block}")
        require(self.output in (OWN, OF_TARGET), f"output must be {OWN} or {OF_TARGET}, not '{self.output}'")
        for name in ("causal", "windows"):
            values = getattr(self, name) or [0] * self.layers
            require(len(values) == self.layers, f"{name} is of {self.layers} layers, not of {len(values)}")

    @property
    def sight(self) -> list[tuple[bool, int]]:
        """By layer, `causal` and `windows`."""
        causal, windows = self.causal or [False] * self.layers, self.windows or [0] * self.layers
        return list(zip(causal, windows, strict=True))

    @property
    def places(self) -> int:
        """Tokens that a block tells."""
        return self.block if self.from_known else self.block - 1


class DFlashAttention(nn.Module):
    """Attention of a block's tokens over what is known of the text before it, and over the block."""

    def __init__(self, shape: LlamaShape, bias: bool) -> None:
        super().__init__()
        size, self.head_dim = shape.hidden_size, shape.head_dim
        self.shared = shape.num_attention_heads // shape.num_key_value_heads  # query heads that share a key's
        queries, keys = (heads * self.head_dim for heads in (shape.num_attention_heads, shape.num_key_value_heads))
        self.q_proj, self.o_proj = nn.Linear(size, queries, bias=bias), nn.Linear(queries, size, bias=bias)
        self.k_proj, self.v_proj = nn.Linear(size, keys, bias=bias), nn.Linear(size, keys, bias=bias)
        self.q_norm, self.k_norm = (LlamaNorm(self.head_dim, shape.rms_norm_eps) for _ in range(2))

    def forward(
        self,
        hidden: Float[Tensor, "batch tokens hidden"],
        known: Float[Tensor, "batch before hidden"],
        angles: tuple[Tensor, Tensor],
        seen: Bool[Tensor, "batch 1 tokens before+tokens"],
    ) -> Float[Tensor, "batch tokens hidden"]:
        """`angles` are of all positions, those of `known` first."""
        both = torch.cat([known, hidden], 1)
        queries, keys, values = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project, x in ((self.q_proj, hidden), (self.k_proj, both), (self.v_proj, both))
        )
        cos, sin = (table.unsqueeze(1) for table in angles)
        queries, keys = self.q_norm(queries), self.k_norm(keys)
        own = slice(-hidden.shape[1], None)
        queries = queries * cos[:, :, own] + turned(queries) * sin[:, :, own]
        keys = keys * cos + turned(keys) * sin
        keys, values = (x.repeat_interleave(self.shared, 1) for x in (keys, values))
        attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=seen)
        out: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out


class DFlashLayer(nn.Module):
    def __init__(self, shape: LlamaShape, bias: bool) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(shape, bias)
        self.mlp = LlamaMLP(shape.hidden_size, shape.intermediate_size)
        self.input_layernorm, self.post_attention_layernorm = (
            LlamaNorm(shape.hidden_size, shape.rms_norm_eps) for _ in range(2)
        )

    def forward(
        self, hidden: Float[Tensor, "batch tokens hidden"], *arguments: Any
    ) -> Float[Tensor, "batch tokens hidden"]:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), *arguments)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class DFlashHead(SharingHead):
    """It reads the target's hidden states of all positions before t, of the depths `config.taps`: `fc` fuses them, and
    every layer makes keys and values of them. Into the layers go the embeddings of token t and of as many mask tokens
    as it is to tell; what comes out at a mask's place tells the token there.

    Embeddings are the target's, and so is the output matrix unless `config.output` is "own"; they are neither trained
    nor stored.

    Attributes:
        fc: from as many hidden sizes as there are taps to one.
        hidden_norm: after `fc`.
        layers: a `DFlashLayer` each.
        norm: before the output matrix.
    """

    kind, title, Config = "dflash", "DFlash head", DFlashConfig
    config: DFlashConfig

    def __init__(
        self,
        config: DFlashConfig,
        fingerprint: Float[Tensor, "tokens hidden"],
        tokens: Int[Tensor, " vocab"] | None = None,
    ) -> None:
        super().__init__(config, fingerprint, tokens)
        shape = LlamaShape(**config.shape)
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.fc = nn.Linear(len(config.taps) * size, size, bias=False)
        self.hidden_norm, self.norm = LlamaNorm(size, eps), LlamaNorm(size, eps)
        self.layers = nn.ModuleList(DFlashLayer(shape, config.bias) for _ in range(config.layers))
        self.rotary = _rotary(shape)
        self.register_buffer("embedding", None, persistent=False)
        own = config.output == OWN and tokens is not None
        self.register_buffer("matrix", torch.empty(len(tokens), size) if own and tokens is not None else None, own)

    @classmethod
    def from_target(
        cls,
        model: PreTrainedModel,
        layers: int = 1,
        *,
        block: int = 8,
        tokens: Sequence[int] | None = None,
        taps: Sequence[int] = (),
        mask: int | None = None,
        inner: int | None = None,
        name: str | None = None,
        seed: int = 0,
    ) -> Self:
        """A head to train, in the model's dtype, with random layers.

        Args:
            model: the target, whole.
            layers: K.
            block: see `DFlashConfig`.
            tokens: ids that can be drafted; None: all.
            taps: see `DFlashConfig`; by default five that are evenly spread, as DFlash's authors chose them.
            mask: see `DFlashConfig`; by default the target's last token, which texts seldom have.
            inner: width of the layers' MLPs; by default as the target's.
            name: of the target; by default as the model says.
            seed: of what is drawn.

        Raises:
            OptionError: a number out of range.
            UnsupportedModel: a model whose layers do not run one by one.
        """
        target = with_blocks(as_target(model), cls.kind)
        deepest = target.num_layers
        chosen = sorted(set(taps)) or spread_taps(deepest)  # ascending, as a store of states has them
        require(all(0 <= tap <= deepest for tap in chosen), f"taps must lie in 0 .. {deepest}, not {chosen}")
        require(inner is None or inner >= 1, f"inner must be >= 1, not {inner}")
        last = target.vocab_size - 1
        require(mask is None or 0 <= mask <= last, f"mask must lie in 0 .. {last}, not {mask}")
        made = cls(
            DFlashConfig(
                layers=layers,
                taps=chosen,
                block=block,
                mask=last if mask is None else mask,
                target=name or model_key(target),
                shape=target_shape(target.config) | ({"intermediate_size": inner} if inner else {}),
            ),
            probe_features(target),
            as_ids(tokens, target.vocab_size),
        ).place(model.device, model.dtype)
        made.draw(seed)
        made.know(embedding_matrix(model), output_matrix(model), Adjustment.of(model))
        return made

    @property
    def shares_output(self) -> bool:
        """Whether the output matrix is the target's."""
        return self.config.output == OF_TARGET

    def probe(self, target: Target) -> Float[Tensor, "tokens hidden"] | None:
        fits = max(self.config.taps) <= target.num_layers and self.config.mask < target.vocab_size
        return probe_features(target) if fits else None

    # -- training --------------------------------------------------------------------------------------------------
    def known(self, states: Float[Tensor, "batch before taps*hidden"]) -> Float[Tensor, "batch before hidden"]:
        """What the layers make keys and values of."""
        made: Tensor = self.hidden_norm(self.fc(states))
        return made

    def forward(
        self,
        known: Float[Tensor, "batch before hidden"],
        ids: Int[Tensor, "batch tokens"],
        positions: Int[Tensor, "batch before+tokens"],
        seen: Bool[Tensor, "batch 1 tokens before+tokens"],
    ) -> Float[Tensor, "batch tokens hidden"]:
        """What the output matrix reads, at the places of blocks.

        Args:
            known: see `known`.
            ids: known and mask tokens.
            positions: of what is known, then of the blocks' tokens.
            seen: who sees whom; the same in all layers.
        """
        hidden = self.embedded(ids, known)
        angles = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, known, angles, seen)
        made: Tensor = self.norm(hidden)
        return made

    def outputs(self, states: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        """Logits of the tokens that can be drafted."""
        return self.told_by_matrix(states)


def spread_taps(layers: int, count: int = 5) -> list[int]:
    """So many, evenly spread over what leaves layers 1 .. `layers` - 3, counted from 0, as DFlash's authors chose them;
    fewer of a small model. A single one is what leaves the middle layer.
    """
    last = max(1, layers - 3)
    chosen = {1 + round(1 + at * (last - 1) / (count - 1)) for at in range(count)} if count > 1 else {1 + layers // 2}
    return sorted({min(tap, layers) for tap in chosen})


def target_shape(config: Any) -> dict[str, Any]:
    """The shape of layers like a target's: heads, sizes, rotation."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    rope = dict(getattr(text, "rope_parameters", None) or {})
    rope.pop("partial_rotary_factor", None)  # here all of a head is rotated
    plain = "rope_theta" in rope  # else each kind of layer has its own
    return {
        "hidden_size": text.hidden_size,
        "intermediate_size": text.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
        "max_position_embeddings": text.max_position_embeddings,
        "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-5,
        "rope_parameters": rope if plain else {"rope_type": "default", "rope_theta": 10000.0},
    }


def _rotary(shape: LlamaShape) -> nn.Module:
    """cos and sin of positions' angles, scaled or not."""
    if shape.rope_parameters.get("rope_type", "default") == "default":
        return LlamaRotary(shape)
    from transformers import LlamaConfig  # which takes seconds: most models' positions are plain
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(LlamaConfig(**asdict(shape)))
