"""Phi-3's long models: a text that crosses a length is read again, since all its positions turn by other factors then.

In transformers, rotary embeddings of the kind "longrope" take short or long factors by the last position of a pass. For
these models `generate` drops the cache once, where a text becomes longer than the short factors are for. So the logits
after each token are those of one pass over the text up to there; they are here, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.targets.cache import CacheWindow
from paceline.targets.context import ORIGINAL, longest
from paceline.targets.layered import LayeredCache, Layout, Rings
from paceline.targets.span import Span
from paceline.targets.target import PassOutput
from paceline.targets.whole import WholeTarget

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paceline.targets.cache import KVCache
    from paceline.targets.states import States

READ_AGAIN = ("phi3", "phimoe", "phi4_multimodal")  # in their `prepare_inputs_for_generation`


def crosses(model: PreTrainedModel) -> bool:
    """Whether `generate` reads a text of this model again where it becomes long."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    length, window = getattr(config, ORIGINAL, None), getattr(config, "sliding_window", None)
    return (
        config.model_type in READ_AGAIN
        and rope.get("rope_type") == "longrope"
        and length is not None
        and rope.get(ORIGINAL) == length
        and longest(config) > length
        and (window is None or window >= longest(config))
    )


class Texts:
    """What the rows of a cache hold: shared by the views of its rows."""

    def __init__(self, batch: int) -> None:
        self.ids: list[list[int]] = [[] for _ in range(batch)]
        self.drafted: list[list[int]] = [[] for _ in range(batch)]  # by the last pass
        self.long = [False] * batch  # whether keys were turned by the long factors


class TextCache(LayeredCache):
    """Keys and values, and the tokens that they are of."""

    def __init__(
        self, rings: Rings, lengths: np.ndarray, texts: Texts, first: int = 0, owner: LayeredCache | None = None
    ) -> None:
        super().__init__(rings, lengths, first, owner)
        self.texts = texts

    def rows(self, start: int, stop: int) -> TextCache:
        return TextCache(self._rings, self.lengths[start:stop], self.texts, self.first_row + start, self._owner)

    @property
    def text(self) -> list[int]:
        """The committed tokens of a single row."""
        return self.texts.ids[self.first_row][: int(self.lengths[0])]

    def note(self, span: Span) -> None:
        """What a pass over a single row reads."""
        ids = span.ids[0].tolist()
        self.texts.ids[self.first_row] = self.text + (ids if span.final else [])
        self.texts.drafted[self.first_row] = ids

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        for row, path in enumerate(paths, self.first_row):
            self.texts.ids[row] += [self.texts.drafted[row][node] for node in path]
        super().commit(paths)

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        for kept in (self.texts.ids, self.texts.drafted):
            kept[self.first_row + target] = list(kept[self.first_row + source])
        self.texts.long[self.first_row + target] = self.texts.long[self.first_row + source]


class LongRopeTarget(WholeTarget):
    """A model of these through its whole forward, each row alone."""

    takes_back = False

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        super().__init__(model, tokenizer)
        self._row_by_row = True
        self.border, self.context = self.context, longest(self.config)

    def _read_layout(self) -> tuple[Layout, States]:
        self._kept, states = super()._read_layout()
        return self._kept, states

    def new_cache(self, batch: int, capacity: int) -> TextCache:
        rings = Rings(self._kept, batch, capacity, self.dtype, self.device)
        return TextCache(rings, np.zeros(batch, dtype=np.int64), Texts(batch))

    def _pass(self, span: Span, cache: KVCache, taps: Collection[int], keep: int) -> PassOutput:
        assert isinstance(cache, TextCache)
        cache.note(span)
        start, texts, row = int(span.starts[0]), cache.texts, cache.first_row
        last = int(span.positions.max())
        unknown = len(texts.ids[row]) < start  # nobody cares for logits then: a pass is timed
        if last < self.border or unknown:
            texts.long[row] = False
        elif span.final and not start:
            texts.long[row] = True
        elif span.final or start >= self.border:
            if not texts.long[row]:
                texts.long[row] = True
                return self._read_all(span, cache, texts.ids[row][:start], taps)
        else:
            return self._cross(span, cache, taps)
        return super()._pass(span, cache, taps, keep)

    def _cross(self, span: Span, cache: TextCache, taps: Collection[int]) -> PassOutput:
        """Nodes on both sides: one pass for those of a short text, and one over the whole text for the others."""
        cache.texts.long[cache.first_row] = False
        text, beyond = cache.text, span.positions[0] >= self.border
        depths = (span.positions - span.first[:, None]).clamp(max=self.border - 1 - int(span.starts[0]))
        out = super()._pass(Span(span.ids, span.starts, 0, depths, span.ancestors), cache, taps, 0)
        scratch = self.new_cache(1, len(text) + span.width)
        far = self._read_all(span, scratch, text, taps)
        out.logits[:, beyond] = far.logits[:, beyond]
        for tap, hidden in out.taps.items():
            hidden[:, beyond] = far.taps[tap][:, beyond]
        return out

    def _read_all(self, span: Span, cache: KVCache, text: list[int], taps: Collection[int]) -> PassOutput:
        """One pass over a row's committed tokens and the span's: its last position says that the text is long."""
        start, width = len(text), span.width
        ids = torch.cat([torch.tensor([text], dtype=torch.long, device=self.device), span.ids], 1)
        whole = Span(ids, np.zeros(1, dtype=np.int64))
        if span.ancestors is not None:
            whole.depths = torch.cat([torch.arange(start, device=self.device)[None], span.positions], 1)
            whole.ancestors = torch.ones(1, start + width, start + width, dtype=torch.bool, device=self.device).tril()
            whole.ancestors[:, start:, start:] = span.ancestors
        out = self._run(CacheWindow(cache, whole), taps, width)
        return PassOutput(out.logits, {tap: hidden[:, start:] for tap, hidden in out.taps.items()})
