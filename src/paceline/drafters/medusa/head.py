"""Medusa's heads (Cai et al., 2024, section 2.1.1), of K residual blocks each (KOALA, Zhang et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from paceline.drafting.heads import HeadConfig, TrainedHead, as_ids, with_blocks
from paceline.drafting.output_rows import output_rows
from paceline.errors import require
from paceline.targets.families import AS_IT_IS, Adjustment, output_matrix
from paceline.targets.identity import model_key, probe_features
from paceline.targets.reference import as_target
from paceline.targets.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OWN, SHARED, OF_TARGET = VOCABULARIES = ("own", "shared", "target")


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """What Medusa heads are.

    Attributes:
        heads: how many.
        layers: K, residual blocks of each.
        hidden: size of the target's hidden states.
        vocab: tokens they can draft.
        vocabulary: their vocabulary layers: each its "own", one "shared" by all, or that of the "target", which is
            neither trained nor stored.
        accuracies: by head, how often its likeliest token, its second, ... was right; empty where nobody measured.
    """

    heads: int
    layers: int
    hidden: int
    vocab: int
    vocabulary: str = SHARED
    accuracies: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        require(self.heads >= 1, f"there must be 1 Medusa head or more, not {self.heads}")
        require(self.layers >= 1, f"Medusa heads have K = 1 layer or more, not {self.layers}")
        require(
            self.vocabulary in VOCABULARIES,
            f"the vocabulary layer of Medusa heads is {' or '.join(VOCABULARIES)}, not '{self.vocabulary}'",
        )
        require(len(self.accuracies) in (0, self.heads), f"accuracies are of {self.heads} heads or of none")


class MedusaHead(TrainedHead):
    """Head i (from 0) reads the *feature* of a position t, the target's hidden state after its final norm, of which
    the target itself tells token t + 1, and guesses token t + 2 + i: `x <- x + SiLU(W x + b)`, K times with weights of
    their own, then the vocabulary layer.

    The blocks start at zero and the vocabulary layers as the target's, so untrained heads say what the target says.
    """

    kind, title, Config = "medusa", "Medusa head", MedusaConfig
    config: MedusaConfig
    adjusted: Adjustment = AS_IT_IS  # what the target, whose vocabulary layer it is, makes its logits with

    def __init__(
        self,
        config: MedusaConfig,
        fingerprint: Float[Tensor, "tokens hidden"],
        tokens: Int[Tensor, " vocab"] | None = None,
    ) -> None:
        super().__init__(config, fingerprint, tokens)
        heads, size = config.heads, config.hidden
        self.weight = nn.Parameter(torch.zeros(config.layers, heads, size, size))
        self.bias = nn.Parameter(torch.zeros(config.layers, heads, size))
        self.matrix: Tensor | None
        if config.vocabulary == OF_TARGET:
            self.register_buffer("matrix", None, persistent=False)  # until the target is known
        else:
            groups = heads if config.vocabulary == OWN else 1
            self.matrix = nn.Parameter(torch.zeros(groups, config.vocab, size))

    @classmethod
    def from_target(
        cls,
        model: PreTrainedModel,
        *,
        heads: int = 4,
        layers: int = 1,
        vocabulary: str = SHARED,
        tokens: Sequence[int] | None = None,
        name: str | None = None,
    ) -> Self:
        """Heads that say what the target itself says, in the model's dtype.

        Args:
            model: the target, whole.
            heads, layers, vocabulary: see `MedusaConfig`.
            tokens: ids that can be drafted; None: all.
            name: of the target; by default as the model says.

        Raises:
            OptionError: a number out of range.
            UnsupportedModel: a model whose layers do not run one by one.
        """
        target = with_blocks(as_target(model), cls.kind)
        chosen = as_ids(tokens, target.vocab_size)
        config = MedusaConfig(
            heads=heads,
            layers=layers,
            hidden=target.config.hidden_size,
            vocab=target.vocab_size if chosen is None else len(chosen),
            vocabulary=vocabulary,
            target=name or model_key(target),
        )
        head = cls(config, probe_features(target), chosen).place(model.device, model.dtype)
        matrix = output_matrix(model)
        if vocabulary == OF_TARGET:
            adjusted = Adjustment.of(model)
            head.adjusted = adjusted if chosen is None else adjusted._replace(cap=None)
        head.set_output(matrix if chosen is None else matrix[chosen.to(matrix.device)])
        return head

    @torch.no_grad()
    def set_output(self, matrix: Float[Tensor, "vocab hidden"]) -> None:
        """Make this the vocabulary layer of all heads."""
        if self.matrix is None or self.config.vocabulary == OF_TARGET:
            self.matrix = matrix[None]
        else:
            self.matrix.copy_(matrix)

    def probe(self, target: Target) -> Float[Tensor, "tokens hidden"]:
        return probe_features(target)

    def check(self, target: Target, where: str = "given") -> Self:
        super().check(target, where)
        if self.config.vocabulary == OF_TARGET:
            self.set_output(output_rows(target, self.tokens))
        return self

    # -- what it computes ------------------------------------------------------------------------------------------
    def forward(self, features: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows heads vocab"]:
        """Logits over the heads' vocabulary."""
        return self.outputs(self.states(features))

    def states(self, features: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows heads hidden"]:
        """The first half of `forward`: what enters the vocabulary layers."""
        states = features.unsqueeze(-2).expand(*features.shape[:-1], self.config.heads, -1)
        for weight, bias in zip(self.weight, self.bias, strict=True):
            states = states + functional.silu(torch.einsum("...hi,hoi->...ho", states, weight) + bias)
        return states

    def outputs(self, states: Float[Tensor, "*rows heads hidden"]) -> Float[Tensor, "*rows heads vocab"]:
        """The second half."""
        if self.matrix is None:
            raise ValueError("these heads share the target's vocabulary layer: load them with the target")
        if len(self.matrix) == 1:
            return self.adjusted(functional.linear(states, self.matrix[0]), self.tokens)
        return torch.einsum("...hi,hvi->...hv", states, self.matrix)

    def parameter_counts(self) -> dict[str, int]:
        """Parameters, all of them trained, by part: `blocks`, `output`; and their `total`."""
        blocks = self.weight.numel() + self.bias.numel()
        total = sum(weight.numel() for weight in self.parameters())
        return {"blocks": blocks, "output": total - blocks, "total": total}
