"""EAGLE's head (Li et al., 2024, section 4.1), of K decoder layers (KOALA, Zhang et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from paceline.drafters.eagle.stepping_head import SteppingHead
from paceline.drafting.heads import HeadConfig, as_ids, with_blocks
from paceline.drafting.own_layers import layers_config, make_layers
from paceline.errors import require
from paceline.targets.families import FAMILIES, Adjustment, embedding_matrix, output_matrix
from paceline.targets.identity import model_key, probe_features
from paceline.targets.reference import as_target
from paceline.targets.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadConfig):
    """What an EAGLE head is.

    Attributes:
        layers: K, decoder layers.
        bias: whether `fc` has one. Those of EAGLE's authors have, vLLM has none.
        model: the Hugging Face configuration of its layers, which is the target's with fewer of them.
    """

    layers: int
    bias: bool = False
    model: dict[str, Any]

    def __post_init__(self) -> None:
        require(self.layers >= 1, f"an EAGLE head has K = 1 layer or more, not {self.layers}")
        require(self.model.get("num_hidden_layers") == self.layers, f"its model has not {self.layers} layers")


class EagleHead(SteppingHead):
    """At position t it reads the *feature* there, the target's hidden state after its final norm, and the embedding of
    token t + 1, and guesses the feature at t + 1, of which the target's output matrix tells token t + 2:
    `fc([embedding, feature])`, then the layers, of which the first does not norm what its attention reads.

    Embeddings and output matrix are the target's; they are neither trained nor stored.

    Attributes:
        fc: from twice the hidden size to the hidden size.
        lm: the layers, as a Hugging Face model without anything before or after them.
    """

    kind, title, Config = "eagle", "EAGLE head", EagleConfig
    config: EagleConfig

    def __init__(
        self,
        config: EagleConfig,
        fingerprint: Float[Tensor, "tokens hidden"],
        tokens: Int[Tensor, " vocab"] | None = None,
    ) -> None:
        super().__init__(config, fingerprint, tokens)
        self.lm = make_layers(config.model, 0)
        size, family = self.lm.config.hidden_size, FAMILIES[self.lm.config.model_type]
        self.fc = nn.Linear(2 * size, size, bias=config.bias)
        if family.attention_norm:
            setattr(self.decoder.layers[0], family.attention_norm, nn.Identity())
        setattr(self.decoder, family.norm, nn.Identity())
        self.register_buffer("embedding", None, persistent=False)
        self.register_buffer("matrix", None, persistent=False)

    @classmethod
    def from_target(
        cls,
        model: PreTrainedModel,
        layers: int = 1,
        *,
        tokens: Sequence[int] | None = None,
        bias: bool = False,
        name: str | None = None,
        seed: int = 0,
    ) -> Self:
        """A head to train, in the model's dtype, which gives back the features that it reads. Its layers are the
        target's in form, drawn at random, and add nothing yet.

        Args:
            model: the target, whole.
            layers: K, at most as many as the target has.
            tokens: ids that can be drafted; None: all.
            bias: see `EagleConfig`.
            name: of the target; by default as the model says.
            seed: of what is drawn.

        Raises:
            OptionError: a number out of range.
            UnsupportedModel: a model whose layers do not run one by one.
        """
        target = with_blocks(as_target(model), cls.kind)
        require(layers <= target.num_layers, f"an EAGLE head of this model has 1 .. {target.num_layers} layers")
        chosen = as_ids(tokens, target.vocab_size)
        config = EagleConfig(
            layers=layers,
            bias=bias,
            target=name or model_key(target),
            model=layers_config(target.config, layers),
        )
        head = cls(config, probe_features(target), chosen).place(model.device, model.dtype)
        head._start_from(model, seed)
        return head

    @torch.no_grad()
    def _start_from(self, model: PreTrainedModel, seed: int) -> None:
        # Not from the target's last layers: these make activations of hundreds, and of inputs without a norm still
        # more, so that the first steps of training would undo what `fc` starts with.
        drawn, size = torch.Generator().manual_seed(seed), self.fc.out_features
        family = FAMILIES[self.lm.config.model_type]
        adding = (family.out, family.down, "down_proj")  # what a layer adds to what passes by; experts' too
        for name, weight in self.decoder.layers.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1.0 - family.norm_offset if name.endswith("norm.weight") else 0.0)
            elif name.removesuffix(".weight").rpartition(".")[2] in adding:
                weight.zero_()
            else:
                weight.copy_(torch.randn(weight.shape, generator=drawn) * 0.5 * weight.shape[-1] ** -0.5)
        for weight in self.fc.parameters():
            weight.zero_()
        self.fc.weight[:, size:].copy_(torch.eye(size))
        self.know(embedding_matrix(model), output_matrix(model), Adjustment.of(model))

    @property
    def reads(self) -> tuple[int, ...]:
        return ()

    @property
    def decoder(self) -> Any:
        return getattr(self.lm, FAMILIES[self.lm.config.model_type].decoder)

    def probe(self, target: Target) -> Float[Tensor, "tokens hidden"]:
        return probe_features(target)

    # -- training --------------------------------------------------------------------------------------------------
    def fused(self, states: Float[Tensor, "batch tokens hidden"]) -> Float[Tensor, "batch tokens hidden"]:
        """What the first step of a draft reads in place of a guess of the head's own: the features themselves."""
        return states

    def tokens_in(
        self, states: Float[Tensor, "batch tokens hidden"], ids: Int[Tensor, "batch tokens"]
    ) -> Float[Tensor, "batch tokens hidden"]:
        """What comes in of tokens: their embeddings."""
        return self.embedded(ids, states)

    def entered(
        self, state: Float[Tensor, "batch tokens hidden"], token: Float[Tensor, "batch tokens hidden"]
    ) -> Float[Tensor, "batch tokens hidden"]:
        """What the layers read: the feature at position t, or the guess of it, with the token at t + 1."""
        entered: Tensor = self.fc(torch.cat([token, state], -1))
        return entered

    def outputs(self, features: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        """Logits of the tokens that can be drafted, by the target's output matrix."""
        return self.told_by_matrix(features)
