"""Untrained stop predictors in files, for policies that do not go without one."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.policies.predictor_file import Origin, save
from paceline.policies.predictors import HiddenPredictor, Predictor, ResidualPredictor, TopPredictor


def shuffled(predictor: Predictor, seed: int = 0) -> Predictor:
    """With random parameters: it says now this, now that."""
    generator = torch.Generator().manual_seed(seed)
    for weight in predictor.parameters():
        weight.data = torch.randn(weight.shape, generator=generator) / max(weight.shape[-1], 4) ** 0.5
    return predictor


def write(folder: Path, width: int = 32, draft_width: int = 32) -> dict[str, str]:
    """A method string for each policy and form that reads a file."""
    made = {
        "cali-ts": HiddenPredictor(width, draft_width, units=3),
        "specdec++": ResidualPredictor(draft_width),
        "disco": TopPredictor(),
    }
    for policy, predictor in made.items():
        save(folder / f"{policy}.safetensors", shuffled(predictor), Origin(policy, "tests", "tests"))
    return {policy: f"{policy}:predictor={folder / policy}.safetensors" for policy in made}
