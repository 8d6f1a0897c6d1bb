"""Heads that come with paceline."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.drafters.eagle.head import EagleHead
from paceline.drafters.early_exit.head import ExitHead
from paceline.drafters.medusa.head import MedusaHead
from paceline.drafting.heads import FINGERPRINT, SHIPPED, TrainedHead, config_name, weights_name

HEADS = [
    (kind, path.parent)
    for kind in (ExitHead, MedusaHead, EagleHead)
    for path in sorted(SHIPPED.rglob(config_name(kind.kind)))
]


@pytest.mark.parametrize(("kind", "folder"), HEADS, ids=str)
def test_head(kind: type[TrainedHead], folder: Path) -> None:
    """Whole, small, in half precision, for the model whose name its folder has, and with its provenance."""
    model = SHIPPED / folder.relative_to(SHIPPED).parts[0]
    assert kind.load(folder).config.target.startswith(model.name)
    weights = folder / weights_name(kind.kind)
    assert weights.stat().st_size < 16_000_000
    kinds = {tensor.dtype for name, tensor in load_file(weights).items() if name != FINGERPRINT}
    assert kinds <= {torch.float16, torch.int64}
    told = (model / "PROVENANCE.md").read_text(encoding="utf-8")
    assert f"## `{folder.name if folder != model else kind.kind}`" in told


def test_there_is_one() -> None:
    assert (ExitHead, SHIPPED / "smollm2-135m") in HEADS
