"""Is greedy output that of plain decoding? Equal ids are; where they differ, the target's own logits decide.

The target's logits at one width and at another differ in the last bits, so that two argmaxes may flip where two tokens
tie. A difference is a *tie* when both candidates are as good as the best within what that noise can do, else *wrong*.
An exact target has no such noise: there every difference between paceline's own methods is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.targets.span import Span

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from paceline.targets import Target
    from paceline.targets.cache import KVCache

STEPS = 32  # positions compared a prompt
CONTEXT = 512  # tokens of a prompt at most: transformers may give logits of all of them


class Difference(TypedDict):
    """Where a method's output left plain decoding's, though both should be the same; a line of `differences.jsonl`.

    `tokens` are plain decoding's and the method's token at `position` of the output; one of them is null when that
    output had ended, which is always wrong. `gap` is how far the worse of them is below the best logit.
    """

    method: str
    task: str
    temperature: float
    id: str
    turn: int
    position: int
    tokens: list[int | None]
    gap: float | None
    allowed: float
    verdict: str  # "tie" or "wrong"


@torch.inference_mode()
def measure_noise(target: Target, prompts: Sequence[list[int]], model: PreTrainedModel | None = None) -> float:
    """Largest difference of a logit between ways to compute it.

    Without `model`: between passes of one token and one wide pass of the target, over the last positions of each
    prompt. With `model`: between the target's passes of one token and that model's forward over the whole prompt.
    """
    noise = 0.0
    for ids in (ids[:CONTEXT] for ids in prompts):
        steps = min(STEPS, len(ids))
        cache = target.new_cache(1, len(ids))
        target.prefill(ids[:-steps], cache)
        wide = (
            _pass(target, ids[-steps:], cache)
            if model is None
            else model(torch.tensor([ids], device=model.device), use_cache=False).logits[0, -steps:]
        )
        narrow = []
        for token in ids[-steps:]:
            narrow.append(_pass(target, [token], cache)[0])
            cache.commit([[0]])
        noise = max(noise, float((torch.stack(narrow).float() - wide.float()).abs().max()))
    return noise


class Divergence(NamedTuple):
    """The part of a `Difference` that the outputs and the logits say."""

    position: int
    tokens: list[int | None]
    gap: float | None
    verdict: str


def diverge(target: Target, prompt: list[int], plain: list[int], output: list[int], allowed: float) -> Divergence:
    """Where and how `output` leaves `plain`, the output of plain decoding; they must differ.

    Args:
        allowed: the gap that noise explains. Each of two logits may be off by the noise, so it is twice the noise. At
            0 nothing is explained, not even equal logits: of equal bits every argmax is the same.
    """
    shared = min(len(plain), len(output))
    position = next((at for at in range(shared) if plain[at] != output[at]), shared)
    if position == shared:  # one output ended where the other went on: stop conditions, not logits
        ends = [tokens[position] if position < len(tokens) else None for tokens in (plain, output)]
        return Divergence(position, ends, None, "wrong")
    pair = [plain[position], output[position]]
    logits = next_logits(target, prompt + plain[:position])
    gap = float(logits.max() - logits[pair].min())
    return Divergence(position, [*pair], gap, "tie" if gap < allowed else "wrong")


@torch.inference_mode()
def next_logits(target: Target, ids: list[int]) -> Float[Tensor, " vocab"]:
    """The target's logits of the token after `ids`."""
    cache = target.new_cache(1, len(ids))
    target.prefill(ids[:-1], cache)
    return _pass(target, ids[-1:], cache)[0].float()


def _pass(target: Target, ids: list[int], cache: KVCache) -> Float[Tensor, "width vocab"]:
    return target.forward(Span(torch.tensor([ids], device=target.device), cache.lengths.copy()), cache).logits[0]
