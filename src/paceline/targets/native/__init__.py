"""The native tier: a target pass in C++ on the CPU."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.targets.native.build import available, instruction_set, possible

if TYPE_CHECKING:
    from paceline.targets.native.target import NativeTarget, check_model

__all__ = ["NativeTarget", "available", "check_model", "instruction_set", "possible"]


def __getattr__(name: str) -> Any:
    """Import the target when it is first asked for: drafters that search in the library need not its packages."""
    if name not in __all__:
        raise AttributeError(f"module 'paceline.targets.native' has no attribute {name!r}")
    return getattr(import_module("paceline.targets.native.target"), name)
