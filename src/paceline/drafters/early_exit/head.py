"""The exit head: exit layers, norm and output matrix on top of the target's first N layers (EESD, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from paceline.drafting.heads import HeadConfig, TrainedHead, as_ids, with_blocks
from paceline.drafting.own_layers import layers_config, make_layers
from paceline.errors import UnsupportedModel, require
from paceline.targets.families import FAMILIES, output_matrix
from paceline.targets.identity import model_key, probe
from paceline.targets.reference import as_target
from paceline.targets.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_LAYERS = 5


@dataclass(frozen=True, kw_only=True)
class ExitHeadConfig(HeadConfig):
    """What an exit head is.

    Attributes:
        start: N, the number of the target's layers that run before the head.
        exit_layers: decoder layers of its own.
        vocab: tokens it can draft.
        rank: of a low-rank output matrix; None: a full one.
        model: the Hugging Face configuration of its layers, which is the target's with fewer of them.
    """

    start: int
    exit_layers: int
    vocab: int
    rank: int | None
    model: dict[str, Any]


class ExitHead(TrainedHead):
    """Exit layers, norm and output matrix as one Hugging Face model: `lm` is a causal LM of the target's family without
    word embeddings, with `exit_layers` layers and an output row for every token that can be drafted (or `rank` rows,
    which `lift` makes into these). Its inputs are the hidden states that enter the target's layer N.
    """

    kind, title, Config = "early-exit", "exit head", ExitHeadConfig
    config: ExitHeadConfig

    def __init__(
        self,
        config: ExitHeadConfig,
        fingerprint: Float[Tensor, "tokens hidden"],
        tokens: Int[Tensor, " vocab"] | None = None,
    ) -> None:
        super().__init__(config, fingerprint, tokens)
        self.lm = make_layers(config.model, config.rank or config.vocab)
        self.lift = nn.Linear(config.rank, config.vocab, bias=False) if config.rank else None

    @classmethod
    def from_target(
        cls,
        model: PreTrainedModel,
        start: int,
        *,
        exit_layers: int = 1,
        tokens: Sequence[int] | None = None,
        rank: int | None = None,
        copied: int | None = None,
        name: str | None = None,
    ) -> ExitHead:
        """A head that starts as layers of the target's own, its final norm and output matrix, in the model's dtype.

        Args:
            model: the target, or one left with its first layers, N or more, and its last ones.
            start: N.
            exit_layers: 0 .. 5.
            tokens: ids that can be drafted; None: all.
            rank: of the output matrix, which then starts as the nearest matrix of this rank.
            copied: the first of `model`'s layers to start as; by default the last layers are.
            name: of the target; by default as the model says.

        Raises:
            OptionError: a number out of range.
            UnsupportedModel: a model whose layers do not run one by one.
        """
        target = with_blocks(as_target(model), cls.kind)
        layers, vocab = target.num_layers, target.vocab_size
        most = min(MOST_LAYERS, layers)
        require(0 <= exit_layers <= most, f"an exit head of this model has 0 .. {most} layers, not {exit_layers}")
        require(1 <= start < layers, f"an exit head of this model starts at layer 1 .. {layers - 1}, not {start}")
        require(rank is None or 1 <= rank <= target.config.hidden_size, f"an output matrix of rank {rank} is no use")
        copied = layers - exit_layers if copied is None else copied
        require(0 <= copied <= layers - exit_layers, f"there are not {exit_layers} layers to copy from layer {copied}")
        chosen = as_ids(tokens, vocab)
        config = ExitHeadConfig(
            start=start,
            exit_layers=exit_layers,
            vocab=vocab if chosen is None else len(chosen),
            rank=rank,
            target=name or model_key(target),
            model=layers_config(target.config, exit_layers),
        )
        head = cls(config, probe(target, start), chosen).place(model.device, model.dtype)
        head._copy_from(model, copied)
        return head

    @torch.no_grad()
    def _copy_from(self, model: PreTrainedModel, first: int) -> None:
        family = FAMILIES[model.config.model_type]
        mine, theirs = self.decoder, getattr(model, family.decoder)
        for ours, layer in zip(mine.layers, theirs.layers[first : first + len(mine.layers)], strict=True):
            if ours.state_dict().keys() != layer.state_dict().keys():
                raise UnsupportedModel(
                    "an exit head cannot start as layers of another kind than the model's first ones"
                )
            ours.load_state_dict(layer.state_dict())
        getattr(mine, family.norm).load_state_dict(getattr(theirs, family.norm).state_dict())
        matrix = output_matrix(model)
        self.set_output(matrix if self.tokens is None else matrix[self.tokens])

    @torch.no_grad()
    def set_output(self, matrix: Float[Tensor, "vocab hidden"]) -> None:
        """Make this the output matrix, or the nearest one of its rank."""
        output = self.lm.get_output_embeddings().weight
        if self.lift is None:
            output.copy_(matrix)
        else:  # W V V^T with the leading eigenvectors V of W^T W
            matrix = matrix.double()
            leading = torch.linalg.eigh(matrix.T @ matrix).eigenvectors[:, -len(output) :]
            output.copy_(leading.T)
            self.lift.weight.copy_(matrix @ leading)

    @property
    def decoder(self) -> Any:
        return getattr(self.lm, FAMILIES[self.lm.config.model_type].decoder)

    def probe(self, target: Target) -> Float[Tensor, "tokens hidden"] | None:
        return probe(target, self.config.start) if self.config.start < target.num_layers else None

    # -- training --------------------------------------------------------------------------------------------------
    def forward(
        self,
        hidden: Float[Tensor, "batch tokens hidden"],
        positions: Int[Tensor, "batch tokens"] | None = None,
        mask: Int[Tensor, "batch tokens"] | None = None,
    ) -> Float[Tensor, "batch tokens vocab"]:
        """Logits over the head's own vocabulary for whole texts, as training wants them.

        Args:
            hidden: entering the target's layer N (its tap N).
            positions: 0, 1, ... by default.
            mask: 1 for tokens, 0 for padding.
        """
        return self.outputs(self.states(hidden, positions, mask))

    def states(
        self, hidden: Float[Tensor, "batch tokens hidden"], positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Float[Tensor, "batch tokens hidden"]:
        """The first half of `forward`: what enters the output matrix."""
        out = self.decoder(inputs_embeds=hidden, position_ids=positions, attention_mask=mask, use_cache=False)
        states: Tensor = out.last_hidden_state
        return states

    def outputs(self, states: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        """The second half, for the positions that have something to learn."""
        logits: Tensor = self.lm.get_output_embeddings()(states)
        if self.lift is not None:
            logits = self.lift(logits)
        return logits

    def parameter_counts(self) -> dict[str, int]:
        """Parameters, all of them trained, by part: `layers`, `norm`, `output`; and their `total`."""
        total = _count(self)
        layers = _count(self.decoder.layers)
        output = _count(self.lm.get_output_embeddings()) + (_count(self.lift) if self.lift else 0)
        return {"layers": layers, "norm": total - layers - output, "output": output, "total": total}


def _count(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())
