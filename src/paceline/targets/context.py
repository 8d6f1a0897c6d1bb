"""How long a text may become before a model reads what stands in it in another way."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ORIGINAL = "original_max_position_embeddings"  # length that longrope's short factors are for
ENDLESS = 2**31  # of models without a position that is too far


def context_of(config: PretrainedConfig) -> int:
    """Tokens that a text may have: up to there a token's pass depends on nothing behind the token.

    Args:
        config: of the text model.
    """
    limits = [getattr(config, "max_position_embeddings", None), getattr(config, "n_positions", None)]
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):  # of all layers, or by kind of layer
        if isinstance(part, dict) and part.get("rope_type") == "longrope":
            # a pass beyond this length turns all its positions another way
            limits.append(part.get(ORIGINAL) or getattr(config, ORIGINAL, None))
    # Doge keeps this many keys, those that it rates highest; which of two equal ones depends on their slots.
    limits.append(getattr(config, "keep_window_size", None))
    return min((limit for limit in limits if limit), default=ENDLESS)
