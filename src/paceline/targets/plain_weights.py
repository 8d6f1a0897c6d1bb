"""Whether a model is its class and its weights, and nothing else. The fast tiers read the weights and never call the
model's modules, so whatever was changed in these would be lost without a word.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from paceline.errors import ModifiedModel
from paceline.targets.families import FAMILIES
from paceline.targets.llama_layers import LlamaLayer, LlamaLayers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_plain(model: PreTrainedModel) -> None:
    """Raises ModifiedModel for weights that are not plain floating-point tensors in memory, for modules that do more
    than use them (those of quantisers and adapters, hooks, parametrisations, replaced forwards), and for decoders that
    are not what their class makes of their configuration.

    Args:
        model: of one of the `FAMILIES`.
    """
    weights = [*model.parameters()]
    reasons = {
        "quantised weights": getattr(model, "hf_quantizer", None) is not None
        or any(weight.dtype not in FLOATS or type(weight) is not nn.Parameter for weight in weights),
        "weights on several devices": len({weight.device for weight in weights}) != 1,
        "weights of several types": len({weight.dtype for weight in weights}) != 1,
        "weights that are not in memory": any(weight.is_meta for weight in weights),
    }
    found = next((reason for reason, is_so in reasons.items() if is_so), "")
    for name, module in () if found else model.named_modules():
        if what := _more_than_weights(module):
            found = f"{what} ({name or 'the model itself'})"
            break
    if changed := "" if found else _changed(model):
        found = f"a decoder that was changed ({changed})"
    if found:
        raise ModifiedModel(f"the fast tiers do not support {found}: use the reference tier")


def _more_than_weights(module: nn.Module) -> str:
    """What a module has besides its weights; empty where it has nothing."""
    kind = type(module)
    if kind.__module__.split(".")[0] not in ("torch", "transformers", "paceline"):
        return f"adapters, or a {kind.__name__} of another library"
    if is_parametrized(module):
        return "parametrised weights"
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return "hooks, or a forward that was replaced"
    return ""


def _changed(model: PreTrainedModel) -> str:
    """Where the decoder is another than its class makes of its configuration; empty if it is that."""
    if isinstance(model, LlamaLayers):  # a head's, which cannot come from elsewhere
        return "" if all(type(layer) is LlamaLayer for layer in model.model.layers) else "layers of another kind"
    config: Any = deepcopy(model.config.get_text_config())
    family, count = FAMILIES[config.model_type], config.num_hidden_layers
    decoder: Any = getattr(model, family.decoder)
    if len({id(layer) for layer in decoder.layers}) != count or len(decoder.layers) != count:
        return f"{len(decoder.layers)} layers where the configuration says {count}, or some twice"
    config.vocab_size, config.pad_token_id = 1, None  # as little as there can be
    types = getattr(config, "layer_types", None)
    uniform = family.uniform and len({*(types or ())}) <= 1
    if uniform:
        config.num_hidden_layers = 1
        if types:
            config.layer_types = types[:1]
    with torch.device("meta"):
        model_like: Any = type(model)(config)
    fresh = getattr(model_like, family.decoder)
    pairs = {
        f"layers.{index}": (layer, fresh.layers[0 if uniform else index]) for index, layer in enumerate(decoder.layers)
    }
    pairs |= {part: (getattr(decoder, part), getattr(fresh, part)) for part in (family.norm, "rotary_emb")}
    for name, (ours, made) in pairs.items():
        if differs := _difference(ours, made):
            return f"{name}: {differs}"
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    scaled = type(model_like.get_input_embeddings())  # Gemma's multiply by a factor
    for part, kinds in ((inputs, (nn.Embedding, scaled)), (outputs, (nn.Linear, nn.Identity))):
        if type(part) not in kinds:
            return f"a {type(part).__name__} for its {kinds[0].__name__}"
    return ""


def _difference(ours: nn.Module, made: nn.Module) -> str:
    """The first part of a module that is not as in one just made: a type, the shape of a weight, a plain attribute."""
    theirs = dict(made.named_modules())
    for name, part in ours.named_modules():
        twin = theirs.pop(name, None)
        if twin is None or not (_facts(part) == _facts(twin) or _of_eagle(name, part, twin)):
            return name or "itself"
    return next(iter(theirs), "")


def _of_eagle(name: str, part: nn.Module, twin: nn.Module) -> bool:
    """What EAGLE's heads change, which all tiers know: a norm left out, projections of twice the inputs (`beside`)."""
    if type(part) is nn.Identity:
        return "Norm" in type(twin).__name__
    wide = isinstance(part, nn.Linear) and isinstance(twin, nn.Linear) and part.in_features == 2 * twin.in_features
    return wide and name.endswith(("q_proj", "k_proj", "v_proj")) and part.out_features == twin.out_features


#: Plain attributes that say nothing of what a module computes.
_IGNORED = ("training", "layer_idx", "gradient_checkpointing", "max_seq_len_cached", "original_max_seq_len")


def _facts(module: nn.Module) -> tuple[object, ...]:
    shapes = {name: weight.shape for name, weight in module.named_parameters(recurse=False)}
    plain = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int | float | str) and not name.startswith("_") and name not in _IGNORED
    }
    return type(module), shapes, plain
