"""What the target thought of the tokens that were output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class Logprob(NamedTuple):
    """Of one output token, by the target's raw distribution: before temperature, penalties and the like.

    Attributes:
        logprob: natural logarithm of its probability.
        top: the likeliest tokens with theirs, the best first.
    """

    logprob: float
    top: list[tuple[int, float]]


def logprobs_of(logits: Float[Tensor, "tokens vocab"], tokens: Sequence[int], top: int) -> list[Logprob]:
    """Of each token, by the logits that it was taken from; with the `top` likeliest beside it."""
    logprobs = logits.float().log_softmax(-1)
    values, ids = logprobs.topk(top)
    likeliest = [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
    return [Logprob(float(logprobs[at, token]), likeliest[at]) for at, token in enumerate(tokens)]
