"""The reference tier for models without a block view: their whole forward, with our cache, masks and positions."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

from paceline.errors import UnsupportedModel
from paceline.targets.cache import CacheShape, CacheWindow, KVCache
from paceline.targets.families import FAMILIES
from paceline.targets.layered import LayeredCache
from paceline.targets.layout import KINDS, cache_argument, read_layout, uniform_shape
from paceline.targets.target import PassOutput, Target

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paceline.targets.layered import Layout
    from paceline.targets.span import Span
    from paceline.targets.states import States


class WholeTarget(Target):
    """Any other causal LM, through its whole forward. Whether it honours our masks, positions and cache is to be
    proven (`proof.prove`).
    """

    has_blocks = False

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        super().__init__(model, tokenizer)
        # Llama 4 counts positions on from the cache's one length, to scale its queries by them.
        self._row_by_row = bool(getattr(self.config, "attn_temperature_tuning", False))
        self._cache_argument = cache_argument(model)
        layout, self.states = self._read_layout()
        self._shape = None if self.states else uniform_shape(layout)
        self.layout = {} if self._shape else layout

    def _read_layout(self) -> tuple[Layout, States]:
        if "local" in (getattr(self.config, "attention_layers", None) or ()):
            raise UnsupportedModel(f"{self.config.model_type} with local attention counts its window by slot")
        return read_layout(self.model, self.context)

    def cache_shape(self) -> CacheShape:
        assert self._shape is not None  # asked where there is no layout
        return self._shape

    def embed(self, span: Span) -> Tensor:
        raise self._no_blocks()

    def layers(self, *args: object, **kwargs: object) -> Tensor:
        raise self._no_blocks()

    def features(self, hidden: Tensor) -> Tensor:
        raise self._no_blocks()

    def logits(self, features: Tensor) -> Tensor:
        raise self._no_blocks()

    def forward(
        self,
        span: Span,
        cache: KVCache,
        taps: Collection[int] = (),
        start: int = 0,
        hidden: Tensor | None = None,
        keep: int = 0,
    ) -> PassOutput:
        if start or self.num_layers in taps:  # what the model reports last has passed the final norm: `FEATURES`
            raise self._no_blocks()
        if self._row_by_row and span.batch > 1:
            rows = [self._pass(span.row(row), cache.rows(row, row + 1), taps, keep) for row in range(span.batch)]
            tapped = {tap: torch.cat([row.taps[tap] for row in rows]) for tap in taps}
            return PassOutput(torch.cat([row.logits for row in rows]), tapped)
        return self._pass(span, cache, taps, keep)

    def _pass(self, span: Span, cache: KVCache, taps: Collection[int], keep: int) -> PassOutput:
        return self._run(CacheWindow(cache, span), taps, keep)

    def _run(self, window: CacheWindow, taps: Collection[int], keep: int) -> PassOutput:
        span = window.span
        out = self.model(
            input_ids=span.ids,
            **self._place(span, window.cache),
            **{self._cache_argument: window},
            use_cache=True,
            output_hidden_states=bool(taps),
            logits_to_keep=keep,
        )
        return PassOutput(out.logits, {tap: out.hidden_states[tap] for tap in taps})

    def _place(self, span: Span, cache: KVCache) -> dict[str, Any]:
        """What a pass is told of where its tokens stand."""
        return {
            "attention_mask": self._mask(span, cache),
            "position_ids": span.positions.clamp(max=self.context - 1),
        }

    def _mask(self, span: Span, cache: KVCache) -> Tensor | dict[str, Tensor | None] | None:
        """Explicit: left out, the model would build one from its own idea of the cache's length. One for each kind of
        layer, where there are several kinds.
        """
        if not isinstance(cache, LayeredCache):
            return span.mask(self.dtype, explicit=True)
        masks = cache.masks(span, self.dtype)
        if len(masks) < 2:
            return next(iter(masks.values()), None)
        by_type = {kind: masks.get(KINDS.get(kind, "")) for kind in self.config.layer_types}  # None: no attention
        return {**by_type, **masks}

    def _prefill_pass(self, span: Span, cache: KVCache, taps: Collection[int]) -> dict[int, Tensor]:
        return dict(self.forward(span, cache, taps, keep=1).taps)

    def _no_blocks(self) -> UnsupportedModel:
        kind = self.model.config.model_type
        what = (
            f"this {kind} model does more than its layers and runs through its whole forward only"
            if kind in FAMILIES
            else f"{kind} models run through their whole forward only"
        )
        return UnsupportedModel(
            f"{what}: drafters that need the model's layers one by one, or the input of its final norm, support plain "
            f"{', '.join(FAMILIES)}"
        )
