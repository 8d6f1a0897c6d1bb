"""EAGLE-3 heads in two public layouts: the speculators format, which vLLM reads, and that of SafeAILab/EAGLE.

Both have the tensors `fc`, a first layer whose attention reads the token's embedding and then the state, each after a
norm of its own, `norm` and `lm_head`; and for a trimmed vocabulary `d2t`, what is added to an output's number to get
its token, and `t2d`, which tokens have one. Where nothing else is said, the target's hidden states are those that enter
layers 2, L / 2 and L - 3; configurations number them as `Eagle3Config.taps` does.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.drafters.eagle.eagle3_head import OF_TARGET, OWN, Eagle3Config, Eagle3Head, default_taps
from paceline.drafters.eagle.formats import FILES, WRITTEN, llama_facts, name_old_rope, public_layers
from paceline.drafting.heads import with_blocks
from paceline.drafting.layouts import Layout, read_config, read_tensors, require_shapes, write_layout
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

#: Of what a configuration may ask, what `Eagle3Head` does not have.
WITHOUT = ("norm_before_fc", "fc_norm", "norm_output", "input_norm")
VOCABULARY = ("tokens", "matrix")  # of our tensors, those that depend on it
FIRST, ORIGINAL_FIRST = "layers.0.", "midlayer."
OURS = "lm.model."  # what our layers' names begin with besides
#: What the layouts call otherwise, by our names.
NAMES = {f"{OURS}{FIRST}input_layernorm.weight": f"{FIRST}hidden_norm.weight"}
NAMES |= {"entry_norm.weight": f"{FIRST}input_layernorm.weight"}
TAPS = "eagle_aux_hidden_state_layer_ids"
DRAFTED = 3  # tokens a round that the configuration recommends


# -- reading -----------------------------------------------------------------------------------------------------------
def is_eagle3(config: dict[str, Any]) -> bool:
    """Whether a public configuration is of an EAGLE-3 head, or says that it is of a kind like it."""
    named = "eagle3" in str(config.get("architectures")).lower()
    return named or not {"speculators_model_type", "draft_vocab_size", "eagle_config"}.isdisjoint(config)


def read_eagle3(folder: Path, target: Target) -> Eagle3Head:
    """The head in a folder of either layout, for a target that it fits. The tensors say how many layers it has. Its
    word embeddings, where it has them, must be the target's; so may its output matrix be, which is then not kept.

    Raises:
        CheckpointError: missing, unknown or misshaped tensors, or files that cannot be read.
        CheckpointMismatch: a head for another model.
        UnsupportedModel: parts or layers of an unknown kind, or a target whose layers do not run one by one.
    """
    config = read_config(folder)
    fields = _layer_fields(config, folder)
    tensors = {_plain_name(name): tensor for name, tensor in read_tensors(folder, FILES).items()}
    found = [int(match[1]) for name in tensors if (match := re.match(r"layers\.(\d+)\.", name))]
    if not found:
        raise CheckpointError(f"there is no EAGLE-3 head in {folder}: no tensor is called midlayer or layers.0")
    title = f"EAGLE-3 head in {folder}"
    require_fit(fields, tensors, with_blocks(target, Eagle3Head.kind), title)
    if EMBEDDING in tensors:
        require_same(EMBEDDING, tensors.pop(EMBEDDING), embedding_rows, target, title)
    tokens, output = take_vocabulary(tensors, target, title)
    made = Eagle3Config(
        layers=1 + max(found),
        taps=_taps(config, target, title),
        norm_first=bool(config.get("norm_before_residual", "speculators_model_type" in config)),
        output=OF_TARGET if output is None else OWN,
        target=model_key(target),
        trained={"read from": str(folder)},
        model=public_layers(fields, 1 + max(found), target, title),
    )
    try:
        head = Eagle3Head(made, probe_features(target), tokens)
    except Exception as error:  # of transformers' modules, which look at values when they are made
        raise CheckpointError(f"the configuration in {folder} does not make layers: {error!r}") from error
    ours = {name: tensor for name, tensor in head.state_dict().items() if name not in VOCABULARY}
    require_shapes(tensors, {_public_name(name): tensor.shape for name, tensor in ours.items()}, f"the {title}")
    kept = {name: _turned(name, tensors[_public_name(name)]) for name in ours}
    of_vocabulary = zip(VOCABULARY, (tokens, output), strict=True)
    kept |= {name: tensor for name, tensor in of_vocabulary if tensor is not None}
    head.load_state_dict(kept, assign=True)
    return head.check(target, f"in {folder}")


def _layer_fields(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The configuration of the layers. Raises UnsupportedModel for heads of another kind."""
    kind = config.get("speculators_model_type", "eagle3")
    asked = [name for name in WITHOUT if config.get(name) or _eagle_config(config).get(name)]
    if kind != "eagle3" or asked:
        what = asked[0] if asked else f"of the kind {kind}"
        raise UnsupportedModel(f"the head in {folder} is {what}: only EAGLE-3's own form is known here")
    fields = config.get("transformer_layer_config", config)
    if not isinstance(fields, dict):
        raise CheckpointError(f"the configuration in {folder} does not make layers: it has none")
    return fields


def _eagle_config(config: dict[str, Any]) -> dict[str, Any]:
    """Where some trainers write what is EAGLE's."""
    found = config.get("eagle_config")
    return found if isinstance(found, dict) else {}


def _taps(config: dict[str, Any], target: Target, title: str) -> list[int]:
    """What enters these layers. SpecForge and SGLang, in `eagle_config`, count what leaves them."""
    ids, outputs = config.get(TAPS), _eagle_config(config).get(TAPS)
    numbers, further = ids or outputs or default_taps(target.num_layers), int(bool(outputs) and not ids)
    if not isinstance(numbers, list) or not all(type(tap) is int and tap + further >= 0 for tap in numbers):
        raise CheckpointError(f"the {title} reads hidden states that are not numbers of layers: {numbers}")
    return sorted({tap + further for tap in numbers})


def _plain_name(name: str) -> str:
    return name.removeprefix("model.").replace(ORIGINAL_FIRST, FIRST)


def _public_name(name: str) -> str:
    return NAMES.get(name, name.removeprefix(OURS))


def _turned(name: str, tensor: Tensor) -> Tensor:
    """Where the first layer's attention reads the state and then the embedding, with them the other way round."""
    projects = name.startswith(f"{OURS}{FIRST}self_attn.") and name.endswith(tuple(f"{p}_proj.weight" for p in "qkv"))
    return torch.cat(tensor.chunk(2, -1)[::-1], -1) if projects else tensor


# -- writing -----------------------------------------------------------------------------------------------------------
def write_eagle3(head: Eagle3Head, target: Target, out: Path, layout: Layout, dtype: torch.dtype | None = None) -> None:
    """Write a head that was checked against `target` to the new folder `out`, in `dtype` (default: as it is): in the
    speculators format ("vllm"), or for SafeAILab/EAGLE ("original").

    Raises:
        OptionError: there is something in `out`, or the original has no place for such a head.
        UnsupportedModel: its layers are not Llama's.
        DiskFull: there is no room.
    """
    made = head.config
    public = head.token_in is None and not head.shallow
    other = "trained with --token added or --shallow, as the default model's is: name another with --head"
    require(public, f"no public layout has a place for this EAGLE-3 head, {other}")
    if layout == "original":
        plain = made.layers == 1 and not made.norm_first and made.taps == default_taps(target.num_layers)
        require(plain, "the original EAGLE-3 has one layer, whose state passes by unnormed, and taps of its own choice")
    tensors = {_public_name(name): _turned(name, tensor) for name, tensor in head.state_dict().items()}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in VOCABULARY}
    if layout == "original":
        tensors = {name.replace(FIRST, ORIGINAL_FIRST): tensor for name, tensor in tensors.items()}
    own = None if head.shares_output else head.matrix
    tensors |= vocabulary_tensors(head.tokens, own, target, shared=layout == "vllm")
    tensors = {name: t.to(dtype or t.dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    kind = tensors["fc.weight"].dtype
    outputs = target.vocab_size if head.tokens is None else len(head.tokens)
    facts = llama_facts(made.model, target, kind)
    if layout == "original":
        facts |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": outputs}
        name_old_rope(facts)
    else:
        facts = _speculators(facts, made, target, outputs)
    write_layout(out, facts, WRITTEN[layout], tensors)


def _speculators(layers: dict[str, Any], made: Eagle3Config, target: Target, outputs: int) -> dict[str, Any]:
    """The configuration in the speculators format."""
    facts = {"norm_before_residual": made.norm_first, TAPS: made.taps, "draft_vocab_size": outputs}
    return speculators_config("eagle3", "Eagle3Speculator", layers, target, DRAFTED) | facts
