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

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_plain(model: PreTrainedModel) -> None:
    """Raises ModifiedModel for weights that are not plain floating-point tensors in memory, and for modules that do
    more than use them: those of quantisers and adapters, hooks, parametrisations, replaced forwards.
    """
    weights = [*model.parameters()]
    reasons = {
        "quantised weights": getattr(model, "hf_quantizer", None) is not None
        or any(weight.dtype not in FLOATS for weight in weights),
        "weights on several devices": len({weight.device for weight in weights}) != 1,
        "weights of several types": len({weight.dtype for weight in weights}) != 1,
        "weights that are not in memory": any(weight.is_meta for weight in weights),
    }
    found = next((reason for reason, is_so in reasons.items() if is_so), "")
    for name, module in () if found else model.named_modules():
        if what := _more_than_weights(module):
            found = f"{what} ({name or 'the model itself'})"
            break
    if found:
        raise ModifiedModel(f"the fast tiers do not support {found}: use the reference tier")


def _more_than_weights(module: nn.Module) -> str:
    """What a module has besides its weights; empty where it has nothing."""
    kind = type(module)
    if kind.__module__.split(".")[0] not in ("torch", "transformers"):
        return f"adapters, or a {kind.__name__} of another library"
    if is_parametrized(module):
        return "parametrised weights"
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return "hooks, or a forward that was replaced"
    return ""
