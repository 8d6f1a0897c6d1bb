"""Whether a model is made of nothing but its weights. The fast tiers read those and never call the model's modules, so
whatever else the modules do would be lost without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from paceline.errors import ModifiedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PLAIN = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_plain(model: PreTrainedModel) -> None:
    """Raises ModifiedModel for quantised modules, adapters, hooks, parametrisations and forwards that were replaced."""
    for name, module in model.named_modules():
        if what := _more_than_weights(module):
            raise ModifiedModel(f"{name or 'the model'} {what}: only Hugging Face's own modules run it")


def _more_than_weights(module: nn.Module) -> str:
    """What a module has besides its weights; empty where it has nothing."""
    kind = type(module)
    weights = list(module.parameters(recurse=False))
    if any(weight.dim() > 1 for weight in weights) and kind not in (nn.Linear, nn.Embedding):
        if kind.__module__.startswith("transformers.models."):
            return ""  # a part of the model itself: whether a tier knows it is the tier's affair
        return f"is a {kind.__name__}, not a plain matrix"
    if strange := [weight.dtype for weight in weights if weight.dtype not in PLAIN]:
        return f"has weights of type {str(strange[0]).removeprefix('torch.')}"
    if is_parametrized(module):
        return "has parametrised weights"
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return "has a hook, or another forward than its class"
    return ""
