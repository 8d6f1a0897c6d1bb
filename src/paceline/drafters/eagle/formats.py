"""EAGLE-1 and -2 heads in two public layouts: that of SafeAILab/EAGLE and that of vLLM.

Both are a Llama configuration with `num_hidden_layers` = K and the tensors `fc` and `layers.0` .. `layers.{K-1}`, the
first layer without `input_layernorm`. The original has the target's word embeddings besides, and may have a bias in
`fc`, which vLLM has no place for. Output matrix and final norm are the target's.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.drafters.eagle.head import EagleConfig, EagleHead
from paceline.drafting.heads import with_blocks
from paceline.drafting.layouts import Layout, read_config, read_tensors, require_shapes, write_layout
from paceline.drafting.output_rows import embedding_rows, output_rows
from paceline.drafting.own_layers import layers_config
from paceline.drafting.public_heads import EMBEDDING, OUTPUT, require_fit, require_same
from paceline.errors import CheckpointError, UnsupportedModel, require
from paceline.targets.families import FAMILIES, LLAMA
from paceline.targets.identity import model_key, probe_features
from paceline.targets.target import Target

FILES = ("model.safetensors", "pytorch_model.bin")
WRITTEN: dict[Layout, str] = {"original": "pytorch_model.bin", "vllm": "model.safetensors"}
OURS = "lm.model."  # what our layers' names begin with besides
AS_LLAMA = ("llama", "mistral")  # families whose layers are Llama's
ROPE = ("linear", "dynamic")  # scaling that the original program knows

log = logging.getLogger("paceline")


# -- reading -----------------------------------------------------------------------------------------------------------
def read_eagle(folder: Path, target: Target) -> EagleHead:
    """The head in a folder of either layout, for a target that it fits. The tensors say how many layers it has and
    whether `fc` has a bias: published configurations often do not. Word embeddings and an output matrix, where it has
    them, tell whether it was made for this model.

    Raises:
        CheckpointError: missing, unknown or misshaped tensors, or files that cannot be read.
        CheckpointMismatch: a head for another model.
        UnsupportedModel: layers of an unknown kind, or a target whose layers do not run one by one.
    """
    config = read_config(folder)
    if isinstance(config.get("model"), dict):  # of vLLM's own conversions
        config = config["model"]
    tensors = {name.removeprefix("model."): tensor for name, tensor in read_tensors(folder, FILES).items()}
    found = [int(match[1]) for name in tensors if (match := re.match(r"layers\.(\d+)\.", name))]
    if not found:
        raise CheckpointError(f"there is no EAGLE head in {folder}: no tensor is called layers.0")
    title = f"EAGLE head in {folder}"
    require_fit(config, tensors, with_blocks(target, EagleHead.kind), title)
    for name, rows in ((EMBEDDING, embedding_rows), (OUTPUT, output_rows)):
        if name in tensors:
            require_same(name, tensors[name], rows, target, title)
    made = EagleConfig(
        layers=1 + max(found),
        bias="fc.bias" in tensors,
        target=model_key(target),
        trained={"read from": str(folder)},
        model=public_layers(config, 1 + max(found), target, title),
    )
    try:
        head = EagleHead(made, probe_features(target))
    except Exception as error:  # of transformers' modules, which look at values when they are made
        why = " ".join(repr(error).split())
        raise CheckpointError(f"the configuration in {folder} does not make layers: {why}") from error
    own = {name: tensor for name, tensor in tensors.items() if name not in (EMBEDDING, OUTPUT)}
    ours = head.state_dict()
    require_shapes(own, {name.removeprefix(OURS): tensor.shape for name, tensor in ours.items()}, str(folder))
    head.load_state_dict({name: own[name.removeprefix(OURS)] for name in ours}, assign=True)
    return head.check(target, f"in {folder}")


def public_layers(config: dict[str, Any], layers: int, target: Target, title: str) -> dict[str, Any]:
    """The configuration of a head's layers. Positions are the target's: it may be asked about all of them.

    Args:
        config: of a model with the head's layers.
        title: what messages call the head.

    Raises:
        CheckpointError: there are no such layers.
        UnsupportedModel: layers that are not Llama's, or of models like it.
    """
    from transformers import AutoConfig  # which takes seconds: most heads are in our own layout

    kind, fields = config.get("model_type", "llama"), {key: config[key] for key in config.keys() - {"model_type"}}
    if not isinstance(kind, str):
        raise CheckpointError(f"the configuration of the {title} does not make layers: it is of the type {kind}")
    if FAMILIES.get(kind) is not LLAMA:
        raise UnsupportedModel(f"the {title} has layers of {kind}, which are not known here")
    try:
        made = AutoConfig.for_model(kind, **fields)
        made.max_position_embeddings = max(made.max_position_embeddings, target.config.max_position_embeddings)
        return layers_config(made, layers)
    except Exception as error:  # transformers checks values in ways of its own
        why = " ".join(str(error).split())
        raise CheckpointError(f"the configuration of the {title} does not make layers: {why}") from error


# -- writing -----------------------------------------------------------------------------------------------------------
def write_eagle(head: EagleHead, target: Target, out: Path, layout: Layout, dtype: torch.dtype | None = None) -> None:
    """Write a head that was checked against `target` to the new folder `out`, in `dtype` (default: as it is).

    Neither layout has a place for a trimmed vocabulary: there the head drafts any token.

    Raises:
        OptionError: there is something in `out`, or `fc` has a bias, which vLLM has no place for.
        UnsupportedModel: its layers are not Llama's.
        DiskFull: there is no room.
    """
    tensors = eagle_layout(head, target, layout)
    tensors = {name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()}
    facts = llama_facts(head.config.model, target, tensors["fc.weight"].dtype)
    if layout == "original":  # which takes a missing `bias` for true; vLLM would give one to attention
        facts["bias"] = head.config.bias
        name_old_rope(facts)
    write_layout(out, facts, WRITTEN[layout], tensors)


def eagle_layout(head: EagleHead, target: Target, layout: Layout) -> dict[str, Tensor]:
    """The tensors."""
    require(
        layout == "original" or not head.config.bias,
        "vLLM has no place for the bias of this EAGLE head's fc: train one without, or export it as original",
    )
    tensors = {name.removeprefix(OURS): tensor for name, tensor in head.state_dict().items() if name != "tokens"}
    if layout == "original":  # vLLM shares the target's
        tensors[EMBEDDING] = embedding_rows(target, torch.arange(target.vocab_size))
    return tensors


def llama_facts(model: dict[str, Any], target: Target, dtype: torch.dtype) -> dict[str, Any]:
    """The configuration of a Llama with a head's layers, for this and for older versions of transformers.

    Args:
        model: the configuration of the layers.

    Raises:
        UnsupportedModel: they are not Llama's.
    """
    from transformers import LlamaConfig

    fields = dict(model)
    kind = fields.pop("model_type")
    if kind not in AS_LLAMA:
        raise UnsupportedModel(f"public layouts of EAGLE heads have Llama's layers; these are of {kind}")
    fields |= {name: getattr(target.config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = LlamaConfig(vocab_size=target.vocab_size, architectures=["LlamaForCausalLM"], dtype=dtype, **fields)
    facts = config.to_dict()
    rope = dict(facts["rope_parameters"])
    facts["rope_theta"] = rope.pop("rope_theta")
    facts["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
    return facts


def name_old_rope(facts: dict[str, Any]) -> None:
    """Scaled positions in the words of the original program, and a warning of what it does not know."""
    if rope := facts["rope_scaling"]:
        rope["type"] = rope["rope_type"]  # as transformers called it then
        if rope["type"] not in ROPE:
            log.warning(
                "The original program has no RoPE scaling of the type %s: it cannot run this head.", rope["type"]
            )
