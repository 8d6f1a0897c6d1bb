"""DFlash heads in three public layouts: that of z-lab/dflash, the speculators format, which vLLM reads as it does the
first, and that of transformers' assistants.

All have the configuration of Qwen 3's layers and the tensors `fc`, `hidden_norm` (transformers: `encoder.fc`,
`encoder.output_norm_enc`), `layers.0` and further ones, and `norm`; in the speculators format an output matrix and a
trimmed vocabulary may come with them. Hidden states are numbered by the layer that they leave, counted from 0; in the
speculators format by the layer that they enter, as `DFlashConfig.taps` does.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from paceline.drafters.dflash.head import OF_TARGET, OWN, DFlashConfig, DFlashHead, spread_taps
from paceline.drafting.heads import config_name, with_blocks
from paceline.drafting.layouts import CONFIG, Layout, read_config, read_tensors, require_shapes, write_layout
from paceline.drafting.output_rows import embedding_rows
from paceline.drafting.public_heads import (
    EMBEDDING,
    require_fit,
    require_same,
    speculators_config,
    take_vocabulary,
    vocabulary_tensors,
)
from paceline.errors import CheckpointError, UnsupportedModel, require
from paceline.targets.identity import model_key, probe_features
from paceline.targets.target import Target

FILES = ("model.safetensors", "pytorch_model.bin")
SPECULATORS, TAPS = "speculators_model_type", "aux_hidden_state_layer_ids"
MASK_EMBEDDING = "mask_embedding.pt"  # of heads whose masks come in as a vector of their own
#: Of what a head may have, what `DFlashHead` does not: configuration fields that must have these values.
WITHOUT = {"projector_type": "dflash", "shift_label": False, "attention_sink_bias": False}
WITHOUT |= {"add_swa_attention_sink_bias": False, "attention_value_scale": None, "is_neox_style": True}
WITHOUT |= {"logit_scale": 1.0, "use_aux_hidden_state": True, "hidden_act": "silu"}
NAMES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}  # of transformers
SHAPE = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "rms_norm_eps", "rope_parameters"),
)
SLIDING = "sliding_attention"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def is_dflash(folder: Path) -> bool:
    """Whether there is a DFlash head in a folder, by what it says of itself."""
    if (folder / config_name(DFlashHead.kind)).exists():
        return True
    config = read_config(folder) if (folder / CONFIG).exists() else {}
    named = "dflash" in f"{config.get('architectures')}{config.get(SPECULATORS)}".lower()
    return named or "dflash_config" in config


# -- reading -----------------------------------------------------------------------------------------------------------
def read_dflash(folder: Path, target: Target) -> DFlashHead:
    """The head in a folder of one of the layouts, for a target that it fits. The tensors say how many layers it has.
    Its word embeddings, where it has them, must be the target's.

    Raises:
        CheckpointError: missing, unknown or misshaped tensors, a configuration that says too little, or files that
            cannot be read.
        CheckpointMismatch: a head for another model.
        UnsupportedModel: a head of another kind, or a target whose layers do not run one by one.
    """
    title = f"DFlash head in {folder}"
    told = _told(read_config(folder), title)
    if (folder / MASK_EMBEDDING).exists():
        raise UnsupportedModel(f"the {title} is of a form that is not known here: it has a {MASK_EMBEDDING}")
    given = read_tensors(folder, FILES)
    assistant = any(name.startswith("encoder.") for name in given)  # of transformers
    tensors = {_plain_name(name): tensor for name, tensor in given.items()}
    found = [int(match[1]) for name in tensors if (match := re.match(r"layers\.(\d+)\.", name))]
    if not found:
        raise CheckpointError(f"there is no DFlash head in {folder}: no tensor is called layers.0")
    require_fit(told, tensors, with_blocks(target, DFlashHead.kind), title)
    if EMBEDDING in tensors:
        require_same(EMBEDDING, tensors.pop(EMBEDDING), embedding_rows, target, title)
    tokens, output = take_vocabulary(tensors, target, title)
    try:
        made = DFlashConfig(
            **_config(told, 1 + max(found), target, title, assistant),
            bias="layers.0.self_attn.q_proj.bias" in tensors,
            output=OF_TARGET if output is None else OWN,
            target=model_key(target),
            trained={"read from": str(folder)},
        )
        head = DFlashHead(made, probe_features(target), tokens)
    except (CheckpointError, UnsupportedModel):
        raise
    except Exception as error:  # transformers checks values in ways of its own
        why = " ".join(str(error).split())
        raise CheckpointError(f"the configuration of the {title} does not make a head: {why}") from error
    ours = {name: tensor.shape for name, tensor in head.state_dict().items() if name not in ("tokens", "matrix")}
    require_shapes(tensors, ours, f"the {title}")
    own = {name: part for name, part in (("tokens", tokens), ("matrix", output)) if part is not None}
    head.load_state_dict(tensors | own, assign=True)
    return head.check(target, f"in {folder}")


def _told(config: dict[str, Any], title: str) -> dict[str, Any]:
    """All that the configuration says, side by side. Raises UnsupportedModel for heads of another kind."""
    kind = config.get(SPECULATORS, "dflash")
    parts = (config.get(name) or {} for name in ("transformer_layer_config", "dflash_config"))
    told = dict(config)
    for part in parts:
        if not isinstance(part, dict):
            raise CheckpointError(f"the configuration of the {title} does not make a head: {part}")
        told |= part
    other = [f"{name} = {told[name]}" for name, known in WITHOUT.items() if told.get(name, known) not in (known, None)]
    if kind != "dflash" or other:
        what = other[0] if other else f"the kind {kind}"
        raise UnsupportedModel(f"the {title} is of a form that is not known here: {what}")
    return told


def _config(told: dict[str, Any], layers: int, target: Target, title: str, assistant: bool) -> dict[str, Any]:
    """Fields of `DFlashConfig`.

    Args:
        assistant: one of transformers, where a block sees all of itself, and a window has one token more.
    """
    from transformers import Qwen3Config  # which takes seconds: most heads are in our own layout

    numbers, further = told.get(TAPS), 0
    if numbers is None and (numbers := told.get("target_layer_ids")) is not None:
        further = 1
    taps = spread_taps(target.num_layers, layers) if numbers is None else [int(number) + further for number in numbers]
    names = ("rope_theta", "rope_scaling", *SHAPE)
    known = Qwen3Config(**{name: told[name] for name in names if told.get(name) is not None})
    shape = {name: getattr(known, name) for name in SHAPE}
    if shape["rope_parameters"].pop("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"the {title} is of a form that is not known here: a part of a head is rotated")
    if "mask_token_id" not in told:
        raise CheckpointError(f"the configuration of the {title} does not make a head: it names no mask_token_id")
    sliding = [kind == SLIDING for kind in (told.get("layer_types") or [])[:layers]] or [False] * layers
    causal = _causal({"is_causal": False} | told if assistant else told, sliding)
    if told.get("use_swa") and not any(sliding):
        sliding = [True] * layers
    window = told.get("swa_window_size") or told.get("sliding_window") or 0
    require(bool(window) or not any(sliding), "its layers have windows, of a size that it does not tell")
    return {
        "layers": layers,
        "taps": taps,
        "block": int(told.get("block_size", 16)),
        "mask": int(told["mask_token_id"]),
        "from_known": bool(told.get("sample_from_anchor", False)),
        "causal": causal,
        "windows": [int(window) + assistant if slides else 0 for slides in sliding],
        "shape": shape,
    }


def _causal(told: dict[str, Any], sliding: list[bool]) -> list[bool]:
    """By layer, whether tokens of a block see no later ones: as is said, else where a layer has a window."""
    for name in ("is_causal", "causal"):
        if told.get(name) is not None:
            return [bool(told[name])] * len(sliding)
    return [slides and not told.get("sliding_window_non_causal", False) for slides in sliding]


def _plain_name(name: str) -> str:
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
    return next((new + name.removeprefix(old) for old, new in NAMES.items() if name.startswith(old)), name)


# -- writing -----------------------------------------------------------------------------------------------------------
def write_dflash(head: DFlashHead, target: Target, out: Path, layout: Layout, dtype: torch.dtype | None = None) -> None:
    """Write a head that was checked against `target` to the new folder `out`, in `dtype` (default: as it is): in the
    speculators format ("vllm"), or for z-lab/dflash ("original"), where a head drafts any token.

    Raises:
        OptionError: there is something in `out`, or the layout has no place for such a head.
        DiskFull: there is no room.
    """
    made, original = head.config, layout == "original"
    require(not original or head.shares_output, "the original DFlash has the model's output matrix, not one of its own")
    require(not made.from_known, "no program reads a DFlash head of which the known token's place tells one, too")
    alike = len(set(made.causal)) <= 1
    require(alike, "no layout is read alike everywhere where some of a head's layers are causal, and others not")
    sizes = sorted({window for window in made.windows if window})
    require(len(sizes) <= 1, f"public layouts have one size for the windows of all layers; this head's are {sizes}")
    tensors = {name: tensor for name, tensor in head.state_dict().items() if name not in ("tokens", "matrix")}
    outputs = target.vocab_size
    if not original:
        tensors |= vocabulary_tensors(head.tokens, None if head.shares_output else head.matrix, target, shared=True)
        outputs = outputs if head.tokens is None else len(head.tokens)
    tensors = {name: t.to(dtype or t.dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    layers = _layers(made, target, tensors["fc.weight"].dtype)
    if original:
        facts = layers | {"architectures": ["DFlashDraftModel"], "block_size": made.block}
        facts["num_target_layers"] = target.num_layers
        numbers = {"mask_token_id": made.mask, "target_layer_ids": [tap - 1 for tap in made.taps]}
        require(min(made.taps) > 0, "the original DFlash reads what leaves a layer: the embeddings are none (tap 0)")
        facts["dflash_config"] = numbers
    else:
        facts = speculators_config("dflash", "DFlashSpeculator", layers, target, made.places) | {
            "draft_vocab_size": outputs,
            "block_size": made.block,
            TAPS: made.taps,
            "mask_token_id": made.mask,
            "sample_from_anchor": False,
            "sliding_window_non_causal": not any(made.causal),
        }
    write_layout(out, facts, FILES[0], tensors)


def _layers(made: DFlashConfig, target: Target, dtype: torch.dtype) -> dict[str, Any]:
    """The configuration of a Qwen 3 with the head's layers."""
    from transformers import Qwen3Config

    sliding = [bool(window) for _, window in made.sight]
    fields: dict[str, Any] = {name: getattr(target.config, name, None) for name in IDS} | made.shape
    if most := getattr(target.config, "max_position_embeddings", None):
        fields["max_position_embeddings"] = most
    fields |= {"vocab_size": target.vocab_size, "attention_bias": made.bias, "tie_word_embeddings": False}
    fields |= {"num_hidden_layers": made.layers, "max_window_layers": made.layers, "dtype": dtype}
    fields |= {"use_sliding_window": any(sliding), "sliding_window": max(made.windows, default=0) or None}
    fields["layer_types"] = [SLIDING if slides else "full_attention" for slides in sliding]
    facts: dict[str, Any] = Qwen3Config(**fields).to_dict()
    return facts | {"is_causal": any(made.causal)}
