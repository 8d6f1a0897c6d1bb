"""How sure a ratio is: a bootstrap over prompts."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

RESAMPLES, SEED = 2000, 0
LEVEL = 0.95
FEWEST = 4  # prompts


def ratio_interval(pairs: Float[np.ndarray, "prompts 4"]) -> tuple[float, float] | None:
    """Where the ratio of two methods' seconds a token lies with a probability of 95 %: percentiles over prompts drawn
    anew, with replacement (Efron, 1979). It tells what other prompts of the same kind would give, and the machine's
    noise as far as it changes from prompt to prompt; always the same for the same measurements.

    Args:
        pairs: of each prompt: seconds and tokens of the method compared with, then of the method itself, measured
            together.

    Returns:
        None for too few prompts to say.
    """
    count = len(pairs)
    if count < FEWEST:
        return None
    drawn = np.random.default_rng(SEED).multinomial(count, np.full(count, 1 / count), RESAMPLES)  # how often each was
    seconds, tokens, own_seconds, own_tokens = (drawn @ pairs).T
    low, high = np.quantile(seconds * own_tokens / (tokens * own_seconds), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
