"""The reference tier for models without a block view: their whole forward, with our cache, masks and positions."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from paceline.errors import UnsupportedModel
from paceline.targets.base import PassOutput, Target
from paceline.targets.cache import CacheShape, CacheWindow, KVCache
from paceline.targets.families import FAMILIES
from paceline.targets.layered import REGION, LayeredCache
from paceline.targets.layout import KINDS, cache_argument, read_layout, small_windows, uniform_shape
from paceline.targets.span import Span

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class WholeTarget(Target):
    """Any other causal LM, through its whole forward. Construction proves on a few tokens that the model honours
    our mask, positions and cache, and refuses it otherwise.
    """

    has_blocks = False

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        super().__init__(model, tokenizer)
        # Llama 4 counts positions on from the cache's one length, to scale its queries by them.
        self._row_by_row = bool(getattr(self.config, "attn_temperature_tuning", False))
        self._cache_argument = cache_argument(model)
        with small_windows(model):
            self._read_layout()
            self._prove()
        self._read_layout()

    def _read_layout(self) -> None:
        layout, self.states = read_layout(self.model, self.context)
        self._shape = None if self.states else uniform_shape(layout)
        self.layout = {} if self._shape else layout

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
        if start or self.num_layers in taps:  # what the model reports last has passed the final norm
            raise self._no_blocks()
        if self._row_by_row and span.batch > 1:
            rows = [self._pass(span.row(row), cache.rows(row, row + 1), taps, keep) for row in range(span.batch)]
            logits, tapped = zip(*rows, strict=True)
            return PassOutput(torch.cat(logits), {tap: torch.cat([row[tap] for row in tapped]) for tap in taps})
        return self._pass(span, cache, taps, keep)

    def _pass(self, span: Span, cache: KVCache, taps: Collection[int], keep: int) -> PassOutput:
        return self._run(CacheWindow(cache, span), taps, keep)

    def _run(self, window: CacheWindow, taps: Collection[int], keep: int) -> PassOutput:
        span = window.span
        out = self.model(
            input_ids=span.ids,
            attention_mask=self._mask(span, window.cache),
            position_ids=span.positions.clamp(max=self.context - 1),
            **{self._cache_argument: window},
            use_cache=True,
            output_hidden_states=bool(taps),
            logits_to_keep=keep,
        )
        return PassOutput(out.logits, {tap: out.hidden_states[tap] for tap in taps})

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
        return self.forward(span, cache, taps, keep=1).taps

    def _no_blocks(self) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self.config.model_type} models run through their whole forward only: drafters that need the model's "
            f"layers one by one, or the input of its final norm, support {', '.join(FAMILIES)}"
        )

    @torch.inference_mode()
    def _prove(self) -> None:
        """A two-branch tree behind a prefix must give what each branch gives alone."""
        prefix, branches = self._text(), [[4, 5], [4, 6]]
        cache = self.new_cache(1, 2 * REGION)
        try:
            self.prefill(prefix, cache)
            tree = torch.tensor([[4, 5, 6]], device=self.device)
            ancestors = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool, device=self.device)
            depths = torch.tensor([[0, 1, 1]], device=self.device)
            got = self.forward(Span(tree, cache.lengths.copy(), 0, depths, ancestors), cache).logits[0, 1:]
            want = torch.stack(
                [self.model(torch.tensor([prefix + branch], device=self.device)).logits[0, -1] for branch in branches]
            )
        except Exception as error:
            raise UnsupportedModel(f"{self.config.model_type} models cannot run token trees: {error}") from error
        # Tight, since a wrong position changes little over so short a prefix: what rounding explains and no more.
        self._compare(got, want, self._epsilon**0.5, "honour a tree mask and positions")

    @property
    def _epsilon(self) -> float:
        """Parts of a model compute in float32, whatever its type."""
        return max(torch.finfo(self.dtype).eps, torch.finfo(torch.float32).eps)

    def _text(self) -> list[int]:
        """A few tokens; more than a ring has slots where there are (small) windows."""
        windows = any(shape.reach.window for shape in self.layout.values())
        return [1, 2, 3] * (REGION // 2 if windows else 3)

    def _compare(self, got: Tensor, want: Tensor, tolerance: float, what: str) -> None:
        """Logits that may differ by so much of their range."""
        if not difference(got, want) <= tolerance:
            raise UnsupportedModel(f"{self.config.model_type} models do not {what}: drafts cannot be verified")


def difference(got: Tensor, want: Tensor) -> float:
    """The largest, as a part of the range of `want`."""
    return float((got - want).abs().max() / (want.max() - want.min()))
