"""The model being accelerated: block view, KV cache, fast paths, where named models come from."""

from __future__ import annotations

import torch

from paceline.targets.target import Target, as_target


def load_target(
    name: str, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu", **options: object
) -> Target:
    """A target from a named model, hub id or folder; `options` as for `paceline.targets.sources.load_model`."""
    from paceline.targets.sources import load_model  # imports transformers' auto classes, which take seconds

    model, tokenizer = load_model(name, dtype=dtype, device=device, **options)
    return as_target(model, tokenizer)


__all__ = ["Target", "as_target", "load_target"]
