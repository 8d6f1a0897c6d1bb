"""The reference tier for models that count positions by their cache: each row alone, as `generate` has them read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from paceline.targets.layout import read_layout, takes_positions
from paceline.targets.reach import Reach
from paceline.targets.target import PassOutput
from paceline.targets.whole import WholeTarget

if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paceline.targets.cache import KVCache
    from paceline.targets.layered import Layout
    from paceline.targets.span import Span
    from paceline.targets.states import States


class OrderedTarget(WholeTarget):
    """A causal LM that works out positions or masks from the length of its cache, through its whole forward.

    A chain of one row over a cache whose slots are its positions is what such a model expects, so it gets no more than
    `generate` gives it. Rejected tokens lie past the cache's length and are overwritten. Layers with windows keep
    all tokens: the model's own mask hides what is out of reach.
    """

    chains_only = True

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        super().__init__(model, tokenizer)
        self._row_by_row = True

    def _read_layout(self) -> tuple[Layout, States]:
        layout, states = read_layout(self.model, self.context)
        return {index: shape._replace(reach=Reach()) for index, shape in layout.items()}, states

    def _pass(self, span: Span, cache: KVCache, taps: Collection[int], keep: int) -> PassOutput:
        if span.ancestors is not None:
            raise ValueError("a model that counts positions by its cache reads chains")
        beyond = max(0, span.seen + span.width - self.context)  # padding beside longer rows
        out = super()._pass(span.part(0, span.width - beyond) if beyond else span, cache, taps, keep)
        return PassOutput(_padded(out.logits, beyond), {tap: _padded(x, beyond) for tap, x in out.taps.items()})

    def _place(self, span: Span, cache: KVCache) -> dict[str, Any]:
        """As `generate` does."""
        mask = torch.ones(1, span.end, dtype=torch.long, device=span.ids.device)
        return {"attention_mask": mask} | ({"position_ids": span.positions} if takes_positions(self.model) else {})


def _padded(x: Float[Tensor, "one width last"], count: int) -> Float[Tensor, "one width+count last"]:
    return nn.functional.pad(x, (0, 0, 0, count)) if count else x
