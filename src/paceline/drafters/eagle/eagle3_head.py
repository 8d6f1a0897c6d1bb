"""EAGLE-3's head (Li et al., 2025): it reads the target's hidden states of several depths, fused, beside the token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from paceline.drafters.eagle.stepping_head import SteppingHead
from paceline.drafting.heads import HeadConfig, as_ids, with_blocks
from paceline.drafting.own_layers import make_layers
from paceline.errors import require
from paceline.targets.families import Adjustment, embedding_matrix, output_matrix
from paceline.targets.identity import model_key, probe_features
from paceline.targets.reference import as_target
from paceline.targets.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OWN, OF_TARGET = "own", "target"
BESIDE, ADDED = "beside", "added"


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(HeadConfig):
    """What an EAGLE-3 head is.

    Attributes:
        layers: K, decoder layers.
        taps: which hidden states of the target it reads: n is what enters layer n; the number of layers, what leaves
            the last.
        norm_first: whether what passes by the first layer's attention is the normed state (`norm_before_residual` in
            the speculators format) or the state itself.
        output: "target": the target's output matrix, not stored; "own": one of the head's own.
        token: how the next token comes in. "beside": only the first layer's attention reads it, as in EAGLE-3; "added":
            to the state, as in EAGLE's first form, so that the layers are plain ones. Then `fc` reads normed states.
        shallow: N: the next token comes in as its own hidden state, what enters the target's layer N; the target runs
            its first N layers over a token when it is drafted from, and its pass goes on from there. 0: as its
            embedding, as in EAGLE-3.
        model: the Hugging Face configuration of its layers, Llama's whatever the target is.
    """

    layers: int = 1
    taps: list[int]
    norm_first: bool = False
    output: str = OF_TARGET
    token: str = BESIDE
    shallow: int = 0
    model: dict[str, Any]

    def __post_init__(self) -> None:
        require(self.layers >= 1, f"an EAGLE-3 head has K = 1 layer or more, not {self.layers}")
        require(self.model.get("num_hidden_layers") == self.layers, f"its model has not {self.layers} layers")
        require(bool(self.taps) and min(self.taps) >= 0, f"taps must be numbers of layers, not {self.taps}")
        require(self.output in (OWN, OF_TARGET), f"output must be {OWN} or {OF_TARGET}, not '{self.output}'")
        require(self.token in (BESIDE, ADDED), f"token must be {BESIDE} or {ADDED}, not '{self.token}'")
        most = min(self.taps)  # the target's pass goes on from there, and tells what enters later layers
        require(0 <= self.shallow <= most, f"shallow must lie in 0 .. {most}, the first of taps, not {self.shallow}")


class WideLayer(nn.Module):
    """Llama's layer whose attention reads two things side by side: the state, normed, and the token's embedding,
    normed. Only the state passes by. It takes `[state | normed embedding]` and gives the new state.
    """

    def __init__(self, layer: Any, norm_first: bool) -> None:
        super().__init__()
        self.kind, self.norm_first = type(layer), norm_first
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * old.in_features, old.out_features, old.bias is not None))

    def forward(self, both: Float[Tensor, "batch tokens twice"], **arguments: Any) -> Float[Tensor, "batch tokens h"]:
        state, beside = both.chunk(2, -1)
        normed = self.input_layernorm(state)
        attended = self.self_attn(hidden_states=torch.cat([normed, beside], -1), **arguments)[0]
        state = (normed if self.norm_first else state) + attended
        made: Tensor = state + self.mlp(self.post_attention_layernorm(state))
        return made

    def plain(self) -> nn.Module:
        """Its modules as a layer of transformers again, for the fast tiers, which read weights and call no module."""
        with torch.device("meta"):
            layer: nn.Module = self.kind(self.self_attn.config, self.self_attn.layer_idx)
        for name, module in self.named_children():
            setattr(layer, name, module)
        return layer


class Eagle3Head(SteppingHead):
    """At position t it reads the target's hidden states there, of the depths `config.taps`, and the embedding of token
    t + 1: `fc` fuses the states, the layers make the state from which token t + 2 is told, and which stands for the
    target's in the next step of a draft.

    Embeddings are the target's, and so is the output matrix unless `config.output` is "own"; they are neither trained
    nor stored.

    Attributes:
        fc: from as many hidden sizes as there are taps to one.
        token_in: where the token is added to the state, the matrix that its embedding goes through; else None.
        lm: the layers, as a Hugging Face model without anything before or after them. The first is a `WideLayer` where
            the token stands beside the state.
        entry_norm: of what comes in of a token.
        norm: before the output matrix.
    """

    kind, title, Config = "eagle3", "EAGLE-3 head", Eagle3Config
    config: Eagle3Config

    def __init__(
        self,
        config: Eagle3Config,
        fingerprint: Float[Tensor, "tokens hidden"],
        tokens: Int[Tensor, " vocab"] | None = None,
    ) -> None:
        super().__init__(config, fingerprint, tokens)
        self.lm = make_layers(config.model, 0)
        size, eps = self.lm.config.hidden_size, self.lm.config.rms_norm_eps
        self.fc = nn.Linear(len(config.taps) * size, size, bias=False)
        self.entry_norm, self.norm = (nn.RMSNorm(size, eps=eps) for _ in range(2))
        self.token_in = nn.Linear(size, size, bias=False) if config.token == ADDED else None
        if self.token_in is None:
            self.decoder.layers[0] = WideLayer(self.decoder.layers[0], config.norm_first)
        self.decoder.norm = nn.Identity()
        self.register_buffer("embedding", None, persistent=False)
        own = config.output == OWN and tokens is not None
        self.register_buffer("matrix", torch.empty(len(tokens), size) if own and tokens is not None else None, own)

    @classmethod
    def from_target(
        cls,
        model: PreTrainedModel,
        layers: int = 1,
        *,
        tokens: Sequence[int] | None = None,
        taps: Sequence[int] = (),
        token: str = BESIDE,
        shallow: int = 0,
        name: str | None = None,
        seed: int = 0,
    ) -> Self:
        """A head to train, in the model's dtype, with random layers.

        Args:
            model: the target, whole.
            layers: K.
            tokens: ids that can be drafted; None: all.
            taps: see `Eagle3Config`; by default a low, a middle and a late one, as EAGLE-3's authors chose them.
            token, shallow: see `Eagle3Config`.
            name: of the target; by default as the model says.
            seed: of what is drawn.

        Raises:
            OptionError: a number out of range.
            UnsupportedModel: a model whose layers do not run one by one.
        """
        target = with_blocks(as_target(model), cls.kind)
        deepest = target.num_layers
        chosen = sorted(set(taps)) or default_taps(deepest, shallow)  # as targets run: from the first layer on
        require(all(0 <= tap <= deepest for tap in chosen), f"taps must lie in 0 .. {deepest}, not {list(taps)}")
        require(0 <= shallow < deepest, f"shallow must lie in 0 .. {deepest - 1}, not {shallow}")
        made = cls(
            Eagle3Config(
                layers=layers,
                taps=list(chosen),
                token=token,
                shallow=shallow,
                target=name or model_key(target),
                model=llama_layers(target.config, layers),
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

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple(sorted({*self.config.taps, self.shallow} if self.shallow else self.config.taps))

    @property
    def shallow(self) -> int:
        return self.config.shallow

    @property
    def decoder(self) -> Any:
        return self.lm.model

    def probe(self, target: Target) -> Float[Tensor, "tokens hidden"] | None:
        return probe_features(target) if max(self.reads) <= target.num_layers else None

    # -- training --------------------------------------------------------------------------------------------------
    def fused(self, states: Float[Tensor, "batch tokens taps*hidden"]) -> Float[Tensor, "batch tokens hidden"]:
        """What the first step of a draft reads in place of a state of the head's own."""
        fused = self.of_taps(states)
        made: Tensor = self.fc(fused if self.token_in is None else self.normed(fused))
        return made

    def of_taps(self, states: Float[Tensor, "*rows read"]) -> Float[Tensor, "*rows taps*hidden"]:
        """What is fused, of what is read."""
        if self.config.taps == list(self.reads):
            return states
        return torch.cat([self._read(states, tap) for tap in self.config.taps], -1)

    def tokens_in(
        self, states: Float[Tensor, "batch tokens read"], ids: Int[Tensor, "batch tokens"]
    ) -> Float[Tensor, "batch tokens hidden"]:
        """What comes in of tokens: their embeddings, or their own states after the target's first layers."""
        if self.shallow:
            return self._read(states, self.shallow)
        return self.embedded(ids, states)

    def _read(self, states: Float[Tensor, "*rows read"], tap: int) -> Float[Tensor, "*rows hidden"]:
        return of_tap(states, self.reads, tap, self.fc.out_features)

    def normed(self, states: Float[Tensor, "*rows taps*hidden"]) -> Float[Tensor, "*rows taps*hidden"]:
        """Each tap's states by themselves, of root mean square 1: taps differ tenfold in size, which training minds."""
        apart = states.reshape(*states.shape[:-1], len(self.config.taps), self.fc.out_features)
        normed: Tensor = functional.rms_norm(apart, apart.shape[-1:], eps=self.config.model["rms_norm_eps"])
        return normed.view(states.shape)

    def entered(
        self, state: Float[Tensor, "batch tokens hidden"], token: Float[Tensor, "batch tokens hidden"]
    ) -> Float[Tensor, "batch tokens width"]:
        """What the layers read: `state` at position t with the token at t + 1. It is twice as wide as the state where
        both stand side by side.
        """
        token = self.entry_norm(token)
        return torch.cat([state, token], -1) if self.token_in is None else state + self.token_in(token)

    def outputs(self, states: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        """Logits of the tokens that can be drafted."""
        return self.told_by_matrix(self.norm(states))


def of_tap(
    states: Float[Tensor, "*rows read"], taps: Sequence[int], tap: int, size: int
) -> Float[Tensor, "*rows hidden"]:
    """Of states that stand side by side, in the order of `taps`, those of one."""
    at = size * taps.index(tap)
    return states[..., at : at + size]


def default_taps(layers: int, shallow: int = 0) -> list[int]:
    """A low, a middle and a late one of a model of so many layers, as EAGLE-3's authors chose them; none before what
    enters layer `shallow`.
    """
    return sorted({min(max(tap, shallow), layers) for tap in (2, layers // 2, layers - 3) if tap > 0})


def llama_layers(config: Any, layers: int) -> dict[str, Any]:
    """The configuration of Llama layers of a target's shape: heads, sizes, rotation, context."""
    from transformers import LlamaConfig

    text = config.get_text_config()
    heads = text.num_attention_heads
    names = ("hidden_size", "intermediate_size", "max_position_embeddings")
    fields = {name: getattr(text, name) for name in names}
    made = LlamaConfig(
        **fields,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        rms_norm_eps=getattr(text, "rms_norm_eps", None) or 1e-5,
        rope_parameters=getattr(text, "rope_parameters", None),
        tie_word_embeddings=False,
    )
    kept = ("rope_parameters", *names, "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    facts = made.to_dict()
    return {"model_type": "llama", "rms_norm_eps": made.rms_norm_eps, **{name: facts[name] for name in kept}}
