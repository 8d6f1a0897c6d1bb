"""EAGLE's head at work: step by step, over a KV cache of its own that follows the target's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from paceline.drafters.eagle.head import EagleHead
from paceline.drafting.base import Row
from paceline.drafting.heads import output_rows
from paceline.drafting.own_layers import fast_layers, fast_linear
from paceline.targets.cache import KVCache
from paceline.targets.linear import linear_module
from paceline.targets.span import Span
from paceline.targets.target import PREFILL_CHUNK, Target

ALONG = 16  # tokens that a row may catch up with in the pass over its root


class EagleForward:
    """What `EagleHead.forward` computes, on the target's own tier.

    Slot t of a row of the cache holds what the head reads at position t: the feature there and token t + 1. Up to the
    root these are the target's features; those that the head guesses stand behind, until the next round.

    `row.state.waiting` are the target's last hidden states `[tokens, hidden]` that the head has not read.
    """

    def __init__(self, head: EagleHead, target: Target) -> None:
        self.target, self.count = target, head.config.layers
        self.fc = fast_linear(head.fc.weight.detach(), None if head.fc.bias is None else head.fc.bias.detach(), target)
        rows = None if head.tokens is None else output_rows(target, head.tokens)
        unused = torch.zeros(1, target.config.hidden_size, dtype=target.dtype, device=target.device)
        head.lm.set_output_embeddings(linear_module(unused if rows is None else rows))
        self.layers = fast_layers(head.lm, target)
        self.logits = target.logits if rows is None else self.layers.logits
        self.cache: KVCache

    def start(self, batch: int, capacity: int) -> None:
        self.cache = self.layers.new_cache(batch, capacity + ALONG)

    def begin(self, row: Row) -> None:
        """A request joins: read what waits, except the root with what it was chosen from."""
        self.cache.lengths[row.slot] = 0
        self._catch_up(row, 1)

    def starts(self, rows: int) -> np.ndarray:
        """Where the trees of the first rows begin in the cache: the slots of their roots."""
        starts: np.ndarray = np.maximum(self.cache.lengths[:rows] - 1, 0)
        return starts

    def roots(self, rows: Sequence[Row]) -> Float[Tensor, "batch hidden"]:
        """The features guessed at the roots, once what waits has been read."""
        for row in rows:
            self._catch_up(row, ALONG)
        news = [row.state.waiting.pop() for row in rows]
        cache, counts = self.cache.rows(0, len(rows)), np.array([len(new) for new in news])
        # Before a prompt of one token there is nothing: its first draft is a blind guess, whose slot the truth gets.
        width = max(*counts, 1)
        hidden = torch.stack([nn.functional.pad(new, (0, 0, 0, width - len(new))) for new in news])
        ids = [(row.ids[-max(len(new), 1) :] + [0] * width)[:width] for row, new in zip(rows, news, strict=True)]
        span = Span(torch.tensor(ids, device=self.target.device), cache.lengths.copy())
        out = self._run(self.target.features(hidden), span, cache)
        cache.lengths += counts
        return out[range(len(rows)), np.maximum(counts - 1, 0)]

    def nodes(self, features: Float[Tensor, "batch width hidden"], span: Span) -> Float[Tensor, "batch width hidden"]:
        """The features guessed at nodes of the trees, from those guessed at their parents."""
        return self._run(features, span, self.cache.rows(0, span.batch))

    def _catch_up(self, row: Row, left: int) -> None:
        """Read what waits except the last `left`, which then stand together."""
        waiting = torch.cat(row.state.waiting)
        own, end = self.cache.rows(row.slot, row.slot + 1), max(len(waiting) - left, 0)
        for at in range(0, end, PREFILL_CHUNK):
            piece, first = waiting[at : min(at + PREFILL_CHUNK, end)], int(own.lengths[0]) + 1
            ids = torch.tensor([row.ids[first : first + len(piece)]], device=self.target.device)
            self._run(self.target.features(piece[None]), Span(ids, own.lengths.copy()), own)
            own.lengths += len(piece)
        row.state.waiting = [waiting[end:]]

    def _run(self, features: Tensor, span: Span, cache: KVCache) -> Float[Tensor, "batch width hidden"]:
        read = torch.cat([self.target.embed(span), features], -1)
        entered = self.fc(read.flatten(0, 1)).view(*features.shape)
        return self.layers.layers(entered, span, cache, 0, self.count)
