"""What `generate` was asked for and does not hand on to a custom loop: its own arguments of the caller's making."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.errors import require

if TYPE_CHECKING:
    from transformers import GenerationConfig
    from transformers.generation.streamers import BaseStreamer

#: Of assisted decoding, which `generate` would do without a custom loop.
ASSISTED = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")


class Asked(NamedTuple):
    """Arguments of the `generate` that called, as far as it does not hand them on; it has put the prompt already."""

    streamer: BaseStreamer | None = None
    assistant_model: object = None
    named: frozenset[str] = frozenset()  # all other arguments


def asked_of_generate(depth: int = 2) -> Asked:
    """Looked up in the caller's frame, the only place that has them: transformers drops them without a word.

    Args:
        depth: of `generate`'s frame above this function's.
    """
    frame = sys._getframe(depth)
    if frame.f_code.co_name != "generate":  # the loop was called by hand
        return Asked()
    given: dict[str, Any] = dict(frame.f_locals)
    return Asked(given.get("streamer"), given.get("assistant_model"), frozenset(given.get("kwargs") or ()))


def refuse_assistants(asked: Asked, config: GenerationConfig) -> None:
    """Raises OptionError for a draft model or its options: a drafter of paceline's takes their place."""
    require(
        asked.assistant_model is None,
        "custom_generate takes no assistant_model: name it as the drafter, "
        "paceline.custom_generate('draft-model:model=...')",
    )
    default = type(config)._get_default_generation_params()
    set_by_hand = [
        name for name in ASSISTED if name in asked.named or getattr(config, name, None) not in (None, default.get(name))
    ]
    require(
        not set_by_hand,
        f"custom_generate knows no {', '.join(set_by_hand)}: policies say how far to draft, "
        "as in paceline.custom_generate('prompt-lookup+fixed:k=4')",
    )
