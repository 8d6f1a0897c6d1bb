"""The model being accelerated: block view, KV cache, fast paths, where named models come from."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.errors import OptionError
from paceline.targets.target import Target, as_target

#: How a target pass runs, as `module:function` of (model, tokenizer): one block view, the same results.
TIERS = {
    "reference": "paceline.targets.target:as_target",  # Hugging Face's modules as they are
    "torch": "paceline.targets.torch_tier:make_torch_target",  # fused, prepacked, width-independent on CPU
    "native": "paceline.targets.native:NativeTarget",  # C++ for the Llama family on CPU, built on first use
}
DEFAULT_TIER = "reference"


def make_target(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, tier: str = "reference"
) -> Target:
    """A target of a loaded model. Tiers other than "reference" take the model's weights over: it is of no use after.

    Raises:
        OptionError: unknown tier.
        UnsupportedModel: the tier or paceline cannot run this model.
    """
    if tier not in TIERS:
        raise OptionError(f"unknown tier '{tier}'; there are {', '.join(TIERS)}")
    module, _, function = TIERS[tier].partition(":")
    return getattr(import_module(module), function)(model, tokenizer)


def load_target(
    name: str,
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    tier: str = DEFAULT_TIER,
    **options: Any,
) -> Target:
    """A target from a named model, hub id or folder; `options` as for `paceline.targets.sources.load_model`."""
    from paceline.targets.sources import load_model  # imports transformers' auto classes, which take seconds

    if tier not in TIERS:  # before a model is loaded
        raise OptionError(f"unknown tier '{tier}'; there are {', '.join(TIERS)}")
    model, tokenizer = load_model(name, dtype=dtype, device=device, **options)
    return make_target(model, tokenizer, tier)


__all__ = ["DEFAULT_TIER", "TIERS", "Target", "as_target", "load_target", "make_target"]
