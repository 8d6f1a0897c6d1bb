"""The reference tier for models with recurrent layers: it verifies chains, and reads accepted tokens again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from paceline.errors import UnsupportedModel
from paceline.targets.span import Span
from paceline.targets.states import MOST_PENDING, Pass, StateCache
from paceline.targets.target import PassOutput
from paceline.targets.whole import WholeTarget

if TYPE_CHECKING:
    from collections.abc import Collection

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paceline.targets.cache import KVCache

#: In transformers these read several tokens as if nothing had come before; of 16-bit numbers the proof cannot see it.
FORGETFUL = ("mamba", "falcon_mamba", "jamba", "zamba")


class StatefulTarget(WholeTarget):
    """A causal LM with states, through its whole forward.

    After a round with a rejected token the state stays where it was, and the next pass begins with the tokens that were
    accepted since: the model's own continuation of several tokens. Their cost is part of the pass's.
    """

    chains_only = True
    takes_back = False

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        if (kind := model.config.get_text_config().model_type) in FORGETFUL:
            raise UnsupportedModel(f"{kind} models do not go on from their states by several tokens, in transformers")
        super().__init__(model, tokenizer)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return StateCache.allocate_states(self.layout, self.states, batch, capacity, self.dtype, self.device)

    def _pass(self, span: Span, cache: KVCache, taps: Collection[int], keep: int) -> PassOutput:
        assert isinstance(cache, StateCache)
        if span.ancestors is not None or span.offset:
            raise ValueError("layers with states read chains, each from its beginning")
        for row, pending in enumerate(cache.pending):
            if len(pending) > MOST_PENDING:
                self._read_pending(cache.rows(row, row + 1))
        again = [len(pending) for pending in cache.pending]
        new = span.ids.tolist()
        most, level = max(again), min(again) == max(again)
        ids = span.ids
        if most:  # what is pending, what is new, padding
            rows = [[*old, *row, *row[-1:] * (most - len(old))] for old, row in zip(cache.pending, new, strict=True)]
            ids = torch.tensor(rows, device=ids.device)
        window = cache.window(Span(ids, span.starts - np.array(again), final=span.final))
        out = self._run(window, taps, keep or (span.width if level else 0))
        if span.final:
            cache.states.take(cache.first_row, window.states)
        else:
            cache.states.last = Pass(new, again, window.states)
        logits = out.logits if level else _behind(out.logits, again, span.width)
        return PassOutput(logits, {tap: _behind(hidden, again, span.width) for tap, hidden in out.taps.items()})

    def _read_pending(self, cache: StateCache) -> None:
        """Into the state of a single row."""
        (pending,) = cache.pending
        ids = torch.tensor([pending], device=self.device)
        window = cache.window(Span(ids, cache.lengths - len(pending), final=True))
        self._run(window, (), 1)
        cache.states.take(cache.first_row, window.states)


def _behind(
    x: Float[Tensor, "batch again+width last"], again: list[int], width: int
) -> Float[Tensor, "batch width last"]:
    """Of each row what comes after the tokens that were read again."""
    if min(again) == max(again):
        return x[:, again[0] : again[0] + width]
    nodes = torch.tensor(again, device=x.device)[:, None] + torch.arange(width, device=x.device)
    return x[torch.arange(len(again), device=x.device)[:, None], nodes]
