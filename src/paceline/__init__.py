"""paceline: faster decoding of Hugging Face causal language models, without changing their output."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.version import __version__

if TYPE_CHECKING:
    from paceline.api import LLM, Output, load
    from paceline.decoding.sampling import SamplingParams
    from paceline.drafters import DRAFTERS
    from paceline.errors import PacelineError
    from paceline.integrations.transformers import custom_generate
    from paceline.policies import POLICIES

__all__ = [
    "DRAFTERS",
    "LLM",
    "POLICIES",
    "Output",
    "PacelineError",
    "SamplingParams",
    "__version__",
    "custom_generate",
    "load",
]

_LAZY = {
    "DRAFTERS": "drafters",
    "POLICIES": "policies",
    "PacelineError": "errors",
    "LLM": "api",
    "Output": "api",
    "load": "api",
    "SamplingParams": "decoding.sampling",
    "custom_generate": "integrations.transformers",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it first is: torch and transformers take seconds, and an interrupt meanwhile is the
    program's to handle.
    """
    if name not in _LAZY:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(import_module(f"paceline.{_LAZY[name]}"), name)
