"""The model being accelerated: block view, KV cache, tiers, what a pass costs, where named models come from."""

from __future__ import annotations

from paceline.targets.target import Target, as_target
from paceline.targets.tiers import AUTO, TIERS, check_tier, load_target, make_target

__all__ = ["AUTO", "TIERS", "Target", "as_target", "check_tier", "load_target", "make_target"]
