"""What a layer-skipping draft is worth, predicted without decoding: acceptance by replaying the target's own text,
time by a cost model measured once. For the search of a skip set (`skip_search`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from paceline.drafters.layer_skip.skip_set import KINDS, SkipSet
from paceline.targets.span import Span

if TYPE_CHECKING:
    from paceline.targets.target import Target

TURNS = 4, 400  # of the passes that are timed: least and most

Skip = Collection[tuple[int, str]]
Matches = list[Bool[np.ndarray, " tokens"]]  # a prompt: whether each token would have been drafted right


class GreedyReplay:
    """The target's greedy continuations of some prompts, against which a draft is checked in one pass.

    In a round the draft sees the committed tokens with the target's exact keys and values. Under greedy decoding
    those tokens are always the target's own, so what the draft would say first at any point of a continuation can be
    computed for all points at once: every token of the continuation is passed once more, with sublayers skipped, each
    seeing the exact tokens before it and itself. What this leaves out: in a round the later drafted tokens see the
    earlier ones with the draft's keys and values, which cost decoding 0 to 4 % of the predicted tokens a pass where
    it was measured.

    Args:
        prompts: token ids.
        tokens: length of the continuations; a shorter one ends with an end-of-sequence token.
    """

    @torch.inference_mode()
    def __init__(self, target: Target, prompts: Sequence[list[int]], tokens: int) -> None:
        self.target = target
        self.cache = target.new_cache(len(prompts), max(map(len, prompts)) + 2 * tokens)
        for row, ids in enumerate(prompts):
            target.prefill(ids[:-1], self.cache.rows(row, row + 1))
        starts = self.cache.lengths.copy()
        # The continuation fills the first `tokens` slots of the draft region; replays write after it.
        text = torch.tensor([ids[-1:] for ids in prompts], device=target.device)
        for step in range(tokens):
            out = target.forward(Span(text[:, step:], starts, offset=step), self.cache)
            text = torch.cat([text, out.logits.argmax(-1)], dim=1)
        self.drafted, self.text = text[:, 1:], text
        self.lengths = [_until(row, target.eos) for row in self.drafted.tolist()]

        steps = torch.arange(tokens, device=target.device).expand(len(prompts), -1)
        before = torch.ones(tokens, tokens, dtype=torch.bool, device=target.device).tril(-1)
        sees = torch.cat([before, torch.eye(tokens, dtype=torch.bool, device=target.device)], dim=1)
        self.span = Span(text[:, :-1], starts, tokens, depths=steps, ancestors=sees.expand(len(prompts), -1, -1))

    @torch.inference_mode()
    def matches(self, skip: Skip) -> Matches:
        """Where a draft without the sublayers `skip` agrees with the target."""
        target = self.target
        hidden = target.layers(target.embed(self.span), self.span, self.cache, 0, target.num_layers, skip)
        right = (target.head(hidden).argmax(-1) == self.drafted).cpu().numpy()
        return [row[:length] for row, length in zip(right, self.lengths, strict=True)]


def tau(matches: Matches, k: int) -> float:
    """Tokens a target pass when `k` are drafted a round: decoding, replayed over the matches."""
    tokens = rounds = 0
    for right in matches:
        at = 0
        while at < len(right):
            missed = np.flatnonzero(~right[at : at + k])
            at += (int(missed[0]) if len(missed) else len(right[at : at + k])) + 1
            rounds += 1
        tokens += len(right)
    return tokens / rounds


@dataclass(frozen=True)
class SkipCosts:
    """Seconds of the passes a round is made of.

    Attributes:
        fixed: of a draft pass without any sublayer (embedding, output matrix).
        sublayer: of one attention and one MLP sublayer in a draft pass.
        verify: of a target pass over 1, 2, ... tokens.
    """

    fixed: float
    sublayer: dict[str, float]
    verify: tuple[float, ...]

    @classmethod
    def of(cls, data: dict[str, Any]) -> SkipCosts:
        """From what `dataclasses.asdict` made of it, through JSON or not."""
        return cls(data["fixed"], data["sublayer"], tuple(data["verify"]))

    def draft(self, skip: SkipSet) -> float:
        """Of one draft pass."""
        return self.fixed + sum(self.sublayer[kind] * (skip.layers - len(getattr(skip, kind))) for kind in KINDS)

    def speedup(self, matches: Matches, draft: float) -> tuple[float, int]:
        """Speed relative to plain decoding at the best draft length, and that length (>= 1)."""
        found = [
            (tau(matches, k) * self.verify[0] / (k * draft + self.verify[k]), k) for k in range(1, len(self.verify))
        ]
        return max(found, key=lambda pair: pair[0])


@torch.inference_mode()
def measure(target: Target, k_max: int = 8, context: int = 128, seconds: float = 30.0) -> SkipCosts:
    """Time the passes on this machine, turn by turn: the fastest of each, as disturbances only add.

    It takes `seconds`, or less where the most of `TURNS` are done before.
    """
    context = min(context, target.context - k_max - 1)
    cache = target.new_cache(1, context + k_max + 1)
    cache.lengths[:] = context
    layers = range(target.num_layers)
    without = {kind: frozenset((layer, kind) for layer in layers) for kind in KINDS}

    def draft(skip: Skip) -> Callable[[], Tensor]:
        def run() -> Tensor:
            span = Span(torch.zeros(1, 1, dtype=torch.long, device=target.device), cache.lengths.copy())
            hidden = target.layers(target.embed(span), span, cache, 0, target.num_layers, skip)
            return target.head(hidden)[:, 0].argmax(-1).cpu()

        return run

    def verify(width: int) -> Callable[[], Tensor]:
        ids = torch.zeros(1, width, dtype=torch.long, device=target.device)
        return lambda: target.forward(Span(ids, cache.lengths.copy()), cache).logits.argmax(-1).cpu()

    nothing = draft(frozenset().union(*without.values()))
    drafts = [nothing, *(draft(without[kind]) for kind in KINDS)]
    passes = [*drafts, *(verify(width) for width in range(1, k_max + 2))]
    best = [float("inf")] * len(passes)
    turns, deadline = 0, time.perf_counter() + seconds
    while turns < TURNS[0] or (turns < TURNS[1] and time.perf_counter() < deadline):
        turns += 1
        for index, run in enumerate(passes):
            started = time.perf_counter()
            run()
            best[index] = min(best[index], time.perf_counter() - started)
    fixed, no_attention, no_mlp, *verified = best
    sublayer = {"attention": no_mlp - fixed, "mlp": no_attention - fixed}
    return SkipCosts(fixed, {kind: max(cost, 0.0) / len(layers) for kind, cost in sublayer.items()}, tuple(verified))


def _until(tokens: list[int], eos: Collection[int]) -> int:
    """Length up to the first end-of-sequence token, that one included."""
    return next((index for index, token in enumerate(tokens, start=1) if token in eos), len(tokens))
