"""The exit head: exit layers, norm and output matrix on top of the target's first N layers (EESD, section 3.1)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from paceline.drafters.early_exit.probe import is_same, probe
from paceline.drafters.skip_set import model_key
from paceline.errors import CheckpointError, CheckpointMismatch, UnsupportedModel
from paceline.registry import require
from paceline.targets.families import FAMILIES
from paceline.targets.store import sha256
from paceline.targets.target import Target, as_target

CONFIG, WEIGHTS = "early-exit.json", "early-exit.safetensors"
MOST_LAYERS = 5
FORMAT = 1
FINGERPRINT = "fingerprint"  # among the tensors of the file

#: Of the target's configuration: what its layers do not depend on.
_LEFT_OUT = (
    *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "quantization_config"),
    *("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
)


@dataclass(frozen=True)
class HeadConfig:
    """What an exit head is: all that is not a tensor.

    Attributes:
        start: N, the number of the target's layers that run before the head.
        exit_layers: decoder layers of its own.
        vocab: tokens it can draft.
        rank: of a low-rank output matrix; None: a full one.
        target: name of the model it was made for.
        model: the Hugging Face configuration of its layers, which is the target's with fewer of them.
        trained: how it was trained; free form.
    """

    start: int
    exit_layers: int
    vocab: int
    rank: int | None
    target: str
    model: dict[str, Any]
    trained: dict[str, Any] = field(default_factory=dict)


class ExitHead(nn.Module):
    """Exit layers, norm and output matrix as one Hugging Face model: `lm` is a causal LM of the target's family without
    word embeddings, with `exit_layers` layers and an output row for every token that can be drafted (or `rank` rows,
    which `lift` makes into these). Its inputs are the hidden states that enter the target's layer N.

    Attributes:
        tokens: ids of the tokens that the outputs stand for, ascending; None: all, in their order.
        fingerprint: of the target (see `probe`).
    """

    tokens: Int[Tensor, " vocab"] | None

    def __init__(
        self, config: HeadConfig, fingerprint: Float[Tensor, "tokens hidden"], tokens: Int[Tensor, " vocab"] | None
    ) -> None:
        super().__init__()
        self.config, self.fingerprint = config, fingerprint
        self.lm = _language_model(config)
        self.lift = nn.Linear(config.rank, config.vocab, bias=False) if config.rank else None
        self.register_buffer("tokens", tokens)

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
        target = _with_blocks(as_target(model))
        layers, vocab = target.num_layers, target.vocab_size
        most = min(MOST_LAYERS, layers)
        require(1 <= start < layers, f"an exit head of this model starts at layer 1 .. {layers - 1}, not {start}")
        require(0 <= exit_layers <= most, f"an exit head of this model has 0 .. {most} layers, not {exit_layers}")
        require(rank is None or 1 <= rank <= target.config.hidden_size, f"an output matrix of rank {rank} is no use")
        copied = layers - exit_layers if copied is None else copied
        require(0 <= copied <= layers - exit_layers, f"there are not {exit_layers} layers to copy from layer {copied}")
        chosen = None if tokens is None else torch.tensor(sorted(set(tokens)), dtype=torch.long)
        if chosen is not None:
            fits = len(chosen) > 0 and int(chosen[0]) >= 0 and int(chosen[-1]) < vocab
            require(fits, f"the tokens to draft must be some of 0 .. {vocab - 1}")
        config = HeadConfig(
            start=start,
            exit_layers=exit_layers,
            vocab=vocab if chosen is None else len(chosen),
            rank=rank,
            target=name or model_key(target),
            model=_own_config(target.config, exit_layers),
        )
        head = cls(config, probe(target, start), chosen).place(model.device, model.dtype)
        head._copy_from(model, copied)
        return head

    @torch.no_grad()
    def _copy_from(self, model: PreTrainedModel, first: int) -> None:
        family = FAMILIES[model.config.model_type]
        mine, theirs = self.decoder, getattr(model, family.decoder)
        for ours, layer in zip(mine.layers, theirs.layers[first : first + len(mine.layers)], strict=True):
            ours.load_state_dict(layer.state_dict())
        getattr(mine, family.norm).load_state_dict(getattr(theirs, family.norm).state_dict())
        matrix = model.get_output_embeddings().weight
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

    def place(self, device: torch.device, dtype: torch.dtype) -> ExitHead:
        """Move it to a device and its parameters, but not the rotary frequencies, to a dtype."""
        self.to(device)
        for weight in self.parameters():
            weight.data = weight.data.to(dtype)
        return self

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
        return out.last_hidden_state

    def outputs(self, states: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        """The second half, for the positions that have something to learn."""
        logits = self.lm.get_output_embeddings()(states)
        return logits if self.lift is None else self.lift(logits)

    def labels(self, ids: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """The outputs that stand for token ids; -100, which cross-entropy leaves out, where there is none."""
        if self.tokens is None:
            return ids
        at = torch.searchsorted(self.tokens, ids).clamp(max=len(self.tokens) - 1)
        return torch.where(self.tokens[at] == ids, at, -100)

    def parameter_counts(self) -> dict[str, int]:
        """Parameters, all of them trained, by part: `layers`, `norm`, `output`; and their `total`."""
        total = _count(self)
        layers = _count(self.decoder.layers)
        output = _count(self.lm.get_output_embeddings()) + (_count(self.lift) if self.lift else 0)
        return {"layers": layers, "norm": total - layers - output, "output": output, "total": total}

    # -- files -----------------------------------------------------------------------------------------------------
    def save(self, folder: Path | str, dtype: torch.dtype | None = None) -> None:
        """Write `early-exit.json` and `early-exit.safetensors`, its parameters in `dtype` (default: as they are).

        Each file is complete when it appears, and the first names the hash of the second.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        if dtype:
            tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        weights, config = (folder / f"{name}.partial" for name in (WEIGHTS, CONFIG))
        save_file({**tensors, FINGERPRINT: self.fingerprint}, weights)
        facts = {"format": FORMAT, **asdict(self.config), "sha256": sha256(weights)}
        config.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        weights.chmod(config.stat().st_mode)  # safetensors keeps its files from all other users
        os.replace(weights, folder / WEIGHTS)
        os.replace(config, folder / CONFIG)

    @classmethod
    def load(cls, folder: Path | str, target: Target | None = None) -> ExitHead:
        """A saved head, in eval mode; with `target` checked against it, on its device and in its dtype.

        Raises:
            CheckpointError: there is none, or it is damaged.
            CheckpointMismatch: it was made for another model than `target`.
        """
        folder = Path(folder)
        facts = read_facts(folder)
        digest = facts.pop("sha256")
        try:
            if sha256(folder / WEIGHTS) != digest:
                raise CheckpointError(f"{folder / WEIGHTS} is damaged: its hash is not the one that {CONFIG} tells")
            tensors = load_file(folder / WEIGHTS)
            head = cls(HeadConfig(**facts), tensors.pop(FINGERPRINT), tensors.get("tokens"))
            head.load_state_dict(tensors, assign=True)
        except OSError as error:
            raise CheckpointError(f"cannot read {folder / WEIGHTS}: {error.strerror}") from error
        except (SafetensorError, TypeError, KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{folder} holds no complete exit head: {' '.join(str(error).split())}") from error
        return head.eval() if target is None else head.check(target, f"in {folder}")

    def check(self, target: Target, where: str = "given") -> ExitHead:
        """Itself in eval mode, on the target's device and in its dtype.

        Raises CheckpointMismatch when it was made for another model.
        """
        start = self.config.start
        fits = start < _with_blocks(target).num_layers
        if not fits or not is_same(probe(target, start), self.fingerprint):
            raise CheckpointMismatch(
                f"the exit head {where} was made for {self.config.target}: "
                f"{target.name} is another model, or another revision of it"
            )
        return self.place(target.device, target.dtype).eval()


def read_facts(folder: Path) -> dict[str, Any]:
    """What the JSON file beside a head's weights says: the fields of its `HeadConfig`, and `sha256`.

    Raises CheckpointError when there is none, or not one of ours.
    """
    try:
        facts = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if facts.pop("format") != FORMAT:
            raise CheckpointError(f"{folder / CONFIG} is of another version of paceline")
    except OSError as error:
        raise CheckpointError(f"there is no exit head in {folder}: {CONFIG}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / CONFIG} does not describe an exit head") from error
    return facts


def _with_blocks(target: Target) -> Target:
    if not target.has_blocks:
        raise UnsupportedModel(f"early exit needs a model whose layers run one by one; {target.name} is not one")
    return target


def _own_config(config: PretrainedConfig, exit_layers: int) -> dict[str, Any]:
    """The target's configuration with the head's number of layers."""
    kept = {key: value for key, value in config.to_diff_dict().items() if key not in _LEFT_OUT}
    if "layer_types" in kept:
        kept["layer_types"] = kept["layer_types"][:exit_layers]  # all alike: other models are refused
    return kept | {"num_hidden_layers": exit_layers, "tie_word_embeddings": False}


def _language_model(config: HeadConfig) -> PreTrainedModel:
    fields = dict(config.model)
    no_ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    kind = AutoConfig.for_model(fields.pop("model_type"), vocab_size=1, **no_ids, **fields)
    lm = AutoModelForCausalLM.from_config(kind)
    kind.vocab_size = config.rank or config.vocab  # only now: two matrices of this size would have been made at random
    lm.set_input_embeddings(nn.Identity())
    lm.set_output_embeddings(nn.Linear(kind.hidden_size, kind.vocab_size, bias=False))
    return lm.eval()


def _count(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())
