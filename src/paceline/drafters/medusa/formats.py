"""Medusa heads in two public layouts: that of FasterDecoding/Medusa and that of vLLM.

In both, every block and every vocabulary layer is a linear layer with a name of its own. The original has a vocabulary
layer a head; in vLLM all heads may share one (`original_lm_head`). That may be trimmed to the tokens of a `token_map`,
which is read but not written: vLLM 0.32 looks for it among the weights that it should have loaded, and gives up.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from paceline.drafters.medusa.head import OWN, SHARED, MedusaConfig, MedusaHead
from paceline.drafting.heads import with_blocks
from paceline.drafting.layouts import CONFIG, Layout, read_config, read_tensors, require_shapes, write_layout
from paceline.errors import CheckpointError, CheckpointMismatch
from paceline.targets.identity import model_key, probe_features
from paceline.targets.target import Target

#: Where tensors are looked for; the original program reads only the pickle that is named first.
FILES = ("medusa_lm_head.safetensors", "model.safetensors", "medusa_lm_head.pt", "pytorch_model.bin")
WRITTEN: dict[Layout, str] = {"original": "medusa_lm_head.pt", "vllm": "model.safetensors"}
TOKENS = "token_map"

log = logging.getLogger("paceline")


@dataclass(frozen=True)
class Names:
    """How a layout calls block l of head h, and the vocabulary layer of head h after K blocks."""

    block: str
    output: str

    def blocks(self, heads: int, layers: int) -> list[list[str]]:
        return [[self.block.format(h=head, l=layer) for head in range(heads)] for layer in range(layers)]

    def outputs(self, heads: int, layers: int) -> list[str]:
        return [f"{self.output.format(h=head, K=layers)}.weight" for head in range(heads)]

    def count(self, names: Iterable[str]) -> tuple[int, int]:
        """Heads and blocks of each."""
        pattern = re.escape(self.block).replace(r"\{h\}", r"(\d+)").replace(r"\{l\}", r"(\d+)") + r"\.weight"
        found = [match.groups() for name in names if (match := re.fullmatch(pattern, name))]
        heads, layers = zip(*found, strict=True) if found else ((), ())
        return 1 + max(map(int, heads), default=-1), 1 + max(map(int, layers), default=-1)


NAMES: dict[Layout, Names] = {
    "original": Names("{h}.{l}.linear", "{h}.{K}"),
    "vllm": Names("blocks.{h}.layers.{l}", "lm_heads.{h}"),
}


# -- reading -----------------------------------------------------------------------------------------------------------
def read_medusa(folder: Path, target: Target) -> MedusaHead:
    """The heads in a folder of either layout, for a target that they fit. The tensors say how many there are:
    published configurations often do not. Nothing in them tells another model of the same size.

    Raises:
        CheckpointError: missing, unknown or misshaped tensors, or files that cannot be read.
        CheckpointMismatch: heads for another hidden size or vocabulary.
        UnsupportedModel: the model's layers do not run one by one.
    """
    scale = read_config(folder).get("logit_scale", 1.0)
    if not (isinstance(scale, int | float) and 0 < scale < inf):
        raise CheckpointError(f"logit_scale in {folder / CONFIG} must be a number > 0, not {scale}")
    tensors = {re.sub(r"^medusa_heads?\.", "", name): tensor for name, tensor in read_tensors(folder, FILES).items()}
    names = NAMES["vllm" if any(name.startswith("blocks.") for name in tensors) else "original"]
    heads, layers = names.count(tensors)
    if not heads:
        raise CheckpointError(f"there are no Medusa heads in {folder}: no tensor is called {names.block}.weight")
    blocks, outputs = names.blocks(heads, layers), names.outputs(heads, layers)
    if names is NAMES["vllm"] and not any(name in tensors for name in outputs[1:]):
        outputs = outputs[:1]  # shared
    _require_fit(tensors, blocks, outputs, target, folder)

    matrices, tokens = [tensors[name] for name in outputs], tensors.get(TOKENS)
    if tokens is not None:
        if len(matrices[0]) > len(tokens):
            matrices = [matrix[tokens] for matrix in matrices]
        tokens, order = tokens.long().sort()
        matrices = [matrix[order] for matrix in matrices]
    same = all(torch.equal(matrix, matrices[0]) for matrix in matrices[1:])
    made = MedusaConfig(
        heads=heads,
        layers=layers,
        hidden=target.config.hidden_size,
        vocab=len(matrices[0]),
        vocabulary=SHARED if same else OWN,
        target=model_key(target),
        trained={"read from": str(folder)},
    )
    zeros = torch.zeros_like(tensors[f"{blocks[0][0]}.weight"][0])
    state = {
        "weight": torch.stack([torch.stack([tensors[f"{name}.weight"] for name in row]) for row in blocks]),
        "bias": torch.stack([torch.stack([tensors.get(f"{name}.bias", zeros) for name in row]) for row in blocks]),
        "matrix": torch.stack(matrices[:1] if same else matrices) * scale,
    }
    head = MedusaHead(made, probe_features(with_blocks(target, MedusaHead.kind)), tokens)
    head.load_state_dict(state if tokens is None else state | {"tokens": tokens}, assign=True)
    return head.check(target, f"in {folder}")


def _require_fit(
    tensors: dict[str, Tensor], blocks: list[list[str]], outputs: list[str], target: Target, folder: Path
) -> None:
    """Raise CheckpointMismatch for heads of another model, CheckpointError for tensors that do not belong together."""
    every, tokens = [name for row in blocks for name in row], tensors.get(TOKENS)
    size, vocab = target.config.hidden_size, target.vocab_size
    known = vocab if tokens is None else len(tokens)
    hidden, rows = (
        next((tensors[name].shape[0] for name in names if name in tensors and tensors[name].dim() == 2), default)
        for names, default in (([f"{name}.weight" for name in every], size), (outputs, known))
    )
    if hidden != size:
        raise CheckpointMismatch(
            f"the Medusa heads in {folder} are for hidden states of {hidden}, those of {target.name} are of {size}"
        )
    if rows not in (vocab, known) or (
        tokens is not None and not all(0 <= token < vocab for token in tokens.flatten().tolist())
    ):
        raise CheckpointMismatch(
            f"the Medusa heads in {folder} are for another vocabulary than that of {target.name}, {vocab} tokens"
        )
    shapes = {f"{name}.weight": [size, size] for name in every} | {name: [rows, size] for name in outputs}
    if any(f"{name}.bias" in tensors for name in every):  # vLLM can do without (medusa_fc_bias)
        shapes |= {f"{name}.bias": [size] for name in every}
    if tokens is not None:
        shapes[TOKENS] = [known]
    require_shapes(tensors, shapes, str(folder), ids=(TOKENS,))


# -- writing -----------------------------------------------------------------------------------------------------------
def write_medusa(head: MedusaHead, target: Target, out: Path, layout: Layout, dtype: torch.dtype | None = None) -> None:
    """Write heads that were checked against `target` to the new folder `out`, in `dtype` (default: as they are).

    Raises:
        OptionError: there is something in `out`.
        DiskFull: there is no room.
    """
    config, tensors = medusa_layout(head, target, layout)
    tensors = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    if layout == "original" and head.config.layers > 1:
        log.warning(
            "The original program ties the blocks of a head, so of K = %d it would use one; vLLM and paceline read "
            "this layout with all of them.",
            head.config.layers,
        )
    config["dtype"] = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    write_layout(out, config, WRITTEN[layout], tensors)


def medusa_layout(head: MedusaHead, target: Target, layout: Layout) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors."""
    heads, layers, names = head.config.heads, head.config.layers, NAMES[layout]
    tensors: dict[str, Tensor] = {}
    for row, weights, biases in zip(names.blocks(heads, layers), head.weight, head.bias, strict=True):
        for name, weight, bias in zip(row, weights, biases, strict=True):
            tensors |= {f"{name}.weight": weight, f"{name}.bias": bias}
    matrices: Any = head.matrix
    full = [_untrimmed(matrix, head.tokens, target.vocab_size) for matrix in matrices]
    shared = layout == "vllm" and len(full) == 1
    outputs = names.outputs(heads, layers)
    tensors |= {outputs[0]: full[0]} if shared else dict(zip(outputs, full * (heads // len(full)), strict=True))
    # The original program has no use for these; vLLM, which reads its layout too, needs them.
    common = {"model_type": "medusa", "hidden_size": head.config.hidden, "vocab_size": target.vocab_size}
    common["medusa_fc_bias"] = True
    if layout == "original":
        config = {"medusa_num_heads": heads, "medusa_num_layers": layers, "version": "2"}
        return config | {"base_model_name_or_path": target.name} | common, tensors
    return {
        "architectures": ["MedusaModel"],
        "num_heads": heads,
        "num_hidden_layers": layers,
        "original_lm_head": shared,
        **common,
    }, tensors


def _untrimmed(
    matrix: Float[Tensor, "tokens hidden"], tokens: Int[Tensor, " tokens"] | None, vocab: int
) -> Float[Tensor, "vocab hidden"]:
    """With rows for the tokens that cannot be drafted: the mean of the others, whose logit is the mean logit and so
    never the largest.
    """
    if tokens is None:
        return matrix
    full = matrix.mean(0).repeat(vocab, 1)
    full[tokens] = matrix
    return full
