"""Self-speculative decoding (Draft & Verify, Zhang et al., 2023): the target drafts with some sublayers left out."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import proxy

from paceline.drafters.layer_skip.skip_set import SkipSet
from paceline.drafting.autoregressive import AutoregressiveDrafter, Step
from paceline.drafting.base import Row
from paceline.drafting.heads import with_blocks
from paceline.drafting.tree import TokenTree, last_nodes
from paceline.registry import AUTO
from paceline.targets.cache import KVCache
from paceline.targets.target import Target


class LayerSkip(AutoregressiveDrafter):
    """Drafts on the target's own KV cache: committed tokens are seen with their exact keys and values, drafted ones
    with the skipping pass's, in the draft region, which the verification pass then overwrites.

    Args:
        skip: file with the set of skipped sublayers, as `paceline layer-skip search` writes it; "auto" takes the
            set found for this model, or else skips evenly.
        copy: whether it copies from the request's text where that repeats itself (see `Copies`); "auto": under
            policies that say so, as `pace` does.
    """

    default_policy = "pace"
    source = "layer-skip"
    files = ("skip",)
    shares_cache = True

    def __init__(self, target: Target, *, skip: str = AUTO, copy: bool | str = AUTO) -> None:
        super().__init__(target, copy=copy)
        with_blocks(target, self.source)
        self.skip = SkipSet.find(target) if skip == AUTO else SkipSet.load(skip, target)
        self.hidden_width = target.config.hidden_size
        self.cache: KVCache

    def start(self, cache: KVCache) -> None:
        self.cache = proxy(cache)  # the engine's, which it may give back without a word

    def step(self, rows: Sequence[Row], trees: Sequence[TokenTree], depth: int) -> Step:
        cache = self.cache.rows(0, len(rows))
        span = last_nodes(trees, cache.lengths, depth, self.target.device)
        hidden = self.target.embed(span)
        hidden = self.target.layers(hidden, span, cache, 0, self.target.num_layers, self.skip.sublayers)
        return Step(self.target.head(hidden)[:, 0], hidden[:, 0])
