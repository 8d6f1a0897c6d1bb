"""How long a text may become, and how long before a model reads what stands in it in another way."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ORIGINAL = "original_max_position_embeddings"  # length that longrope's short factors are for
ENDLESS = 2**31  # of models without a position that is too far


def longest(config: PretrainedConfig) -> int:
    """Tokens that a model has positions for.

    Args:
        config: of the text model.
    """
    limits = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len"))
    return min((limit for limit in limits if limit), default=ENDLESS)


def context_of(config: PretrainedConfig) -> int:
    """Tokens that a text may have: up to there a token's pass depends on nothing after the token.

    Args:
        config: of the text model.
    """
    limits = [longest(config)]
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):  # of all layers, or by kind of layer
        if isinstance(part, dict) and part.get("rope_type") == "longrope":
            # a pass beyond this length turns all its positions another way
            limits.append(part.get(ORIGINAL) or getattr(config, ORIGINAL, None) or ENDLESS)
    # Doge keeps this many keys, those that it rates highest; which of two equal ones depends on their slots.
    limits.append(getattr(config, "keep_window_size", None) or ENDLESS)
    return min(limits)
