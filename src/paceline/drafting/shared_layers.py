"""The target's first layers over drafted tokens, from which its pass goes on (EESD, Liu et al., 2024, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import proxy

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from paceline.drafting.tree import TokenTree
from paceline.targets.cache import KVCache
from paceline.targets.span import Span
from paceline.targets.target import Target


class SharedLayers:
    """The first `count` layers run over a token when it is drafted from, on the target's own cache, at the slot where
    the target's pass wants it. The pass goes on from there, and runs these layers only over what was not drafted from:
    of a chain the last token.

    Attributes:
        nodes: how many of each row's tree the layers have run over in this round, the first ones. A row whose tree has
            fewer was filled up.
    """

    def __init__(self, target: Target, count: int) -> None:
        self.target, self.count, self.nodes = target, count, 0
        self.cache: KVCache
        self._left: list[Tensor] = []  # what left the layers, of these nodes in order

    def start(self, cache: KVCache) -> None:
        self.cache = proxy(cache)  # the engine's, which it may give back without a word

    def begin_round(self) -> None:
        self._left, self.nodes = [], 0

    def starts(self, rows: int) -> np.ndarray:
        """Where the trees of the first rows begin in the cache."""
        starts: np.ndarray = self.cache.lengths[:rows]
        return starts

    def run(self, span: Span) -> Float[Tensor, "batch width hidden"]:
        """Over the next nodes of the round."""
        hidden = self._run(span, self.cache.rows(0, span.batch))
        self._left.append(hidden)
        self.nodes += span.width
        return hidden

    def resume(
        self, read: Sequence[int], trees: Sequence[TokenTree], span: Span, cache: KVCache
    ) -> tuple[int, Float[Tensor, "batch width hidden"] | None]:
        """Where the pass begins; see `Drafter.enter`.

        Args:
            read: how many nodes of each row's tree the layers have run over, the first ones.
        """
        if not self._left:  # one call over all layers takes less than two
            return 0, None
        some = [count for count, tree in zip(read, trees, strict=True) if count < len(tree)]
        first = min(some, default=span.width)
        hidden = [torch.cat(self._left, 1)[:, :first]]
        if first < span.width:
            hidden.append(self._run(span.part(first, span.width), cache))
        return self.count, torch.cat(hidden, 1)

    def _run(self, span: Span, cache: KVCache) -> Float[Tensor, "batch width hidden"]:
        return self.target.layers(self.target.embed(span), span, cache, 0, self.count)
