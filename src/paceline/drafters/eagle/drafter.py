"""EAGLE, EAGLE-2's trees and EAGLE-3 (Li et al., 2024, 2024, 2025), with KOALA's K layers (Zhang et al., 2024)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from paceline.drafters.eagle.eagle3_forward import Eagle3Forward
from paceline.drafters.eagle.eagle3_head import Eagle3Head
from paceline.drafters.eagle.forward import EagleForward
from paceline.drafters.eagle.kinds import take_eagle
from paceline.drafting.base import Row
from paceline.drafting.heads import with_blocks
from paceline.drafting.shared_layers import SharedLayers
from paceline.drafting.stepping.drafter import TOLD, SteppingDrafter
from paceline.drafting.stepping.forward import Guessed
from paceline.drafting.text_vocabulary import TextVocabulary
from paceline.drafting.tree import TokenTree
from paceline.errors import require
from paceline.registry import AUTO
from paceline.targets.cache import KVCache
from paceline.targets.span import Span
from paceline.targets.target import Target


class Eagle(SteppingDrafter):
    """A small decoder guesses the target's next hidden state from the last one and the token that was chosen from it;
    an output matrix makes tokens of it. Of accepted tokens it then reads the target's own hidden states: the last ones,
    or, an EAGLE-3 head, those of several depths.

    Args:
        head: folder of an EAGLE or EAGLE-3 head, or (from Python) an `EagleHead` or `Eagle3Head`, which is taken over;
            "auto": the one trained last on this machine for this model, or else one that is installed, EAGLE-3's first.
        k: layers that the head must have, found or given; None: any number.
        tree, budget: see `SteppingDrafter`.
        extra: most tokens of a request's own text that a head with a trimmed vocabulary can draft besides, for models
            whose output matrix is their embeddings, and heads that use it; 0: none.
        copy: whether chains copy from the request's text where it repeats itself (see `Copies`); "auto": under policies
            that say so, as `pace` does.
    """

    source = "eagle"
    files = ("head",)

    def __init__(
        self,
        target: Target,
        *,
        head: str = AUTO,
        k: int | None = None,
        tree: int = 1,
        budget: int | str = AUTO,
        extra: int = 0,
        copy: bool | str = AUTO,
    ) -> None:
        super().__init__(target, tree, budget, copy)
        require(k is None or k >= 1, f"eagle: a head has k = 1 layer or more, not {k}")
        require(extra >= 0, f"eagle: extra must be >= 0, not {extra}")
        made, self.folder = take_eagle(head, with_blocks(target, self.source), layers=k)
        top = min(tree, TOLD)
        forward = Eagle3Forward(made, target, top) if isinstance(made, Eagle3Head) else EagleForward(made, target, top)
        self.draft_by(forward, made.tokens)
        self.shared_layers = SharedLayers(target, made.shallow) if made.shallow else None
        self.shares_cache = self.shared_layers is not None
        trimmed = made.tokens if made.shares_output else None
        self._text = None if trimmed is None or not extra else TextVocabulary(target, trimmed, extra)

    @property
    def ranks_all(self) -> bool:
        return self._text is None  # tokens of the text compete with the head's own

    def start(self, cache: KVCache) -> None:
        super().start(cache)
        if self.shared_layers:
            self.shared_layers.start(cache)
        if self._text:
            self._text.start(cache.batch)

    def begin(self, row: Row, hidden: dict[int, Float[Tensor, "tokens hidden"]]) -> None:
        super().begin(row, hidden)
        if self._text:
            self._text.begin(row.slot)

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        if self._text:
            self._text.move(source, target)

    @torch.inference_mode()
    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        if self._text:
            self._text.read(rows)
        if self.shared_layers:
            self.shared_layers.begin_round()
        trees = super().draft(rows)
        if self.shared_layers:
            for row, tree in zip(rows, trees, strict=True):
                row.state.read = min(self.shared_layers.nodes, len(tree))
        return trees

    def enter(
        self, rows: Sequence[Row], trees: Sequence[TokenTree], span: Span, cache: KVCache
    ) -> tuple[int, Float[Tensor, "batch width hidden"] | None]:
        # A tree's nodes are verified in another order than they are drafted from.
        if not self.shared_layers or self.tree > 1:
            return 0, None
        return self.shared_layers.resume([row.state.read for row in rows], trees, span, cache)

    def own_states(self, rows: int, span: Callable[[np.ndarray], Span]) -> Float[Tensor, "batch width hidden"] | None:
        return self.shared_layers.run(span(self.shared_layers.starts(rows))) if self.shared_layers else None

    def vocabulary(self, row: Row) -> Int[Tensor, " tokens"] | None:
        return self._text.of(row.slot) if self._text else self.tokens

    def logits(self, made: Guessed) -> Float[Tensor, "batch width tokens"]:
        return self._text.logits(self.forward.features(made.states), made.logits) if self._text else made.logits
