"""The model being accelerated: block view, KV cache, tiers, what a pass costs, where named models come from."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.targets.reference import as_target
    from paceline.targets.target import Target
    from paceline.targets.tiers import AUTO, TIERS, check_tier, load_target, make_target

__all__ = ["AUTO", "TIERS", "Target", "as_target", "check_tier", "load_target", "make_target"]


def __getattr__(name: str) -> Any:
    """Import torch when something that needs it is first asked for: much of this room does not."""
    if name not in __all__:
        raise AttributeError(f"module 'paceline.targets' has no attribute {name!r}")
    home = {"Target": "target", "as_target": "reference"}.get(name, "tiers")
    return getattr(import_module(f"paceline.targets.{home}"), name)
