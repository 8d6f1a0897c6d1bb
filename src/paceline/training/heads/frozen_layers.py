"""The part of a target that does not learn: its layers, cut out of it or whole, and what comes out of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from paceline.targets.families import FAMILIES, OF_LAYERS
from paceline.targets.span import Span
from paceline.training.data.dataset import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from paceline.targets.target import Target

#: Hidden states of a batch's tokens, from the target itself or from a store.
HiddenStates = Callable[[Batch], Float[Tensor, "batch tokens hidden"]]


def cut(model: PreTrainedModel, first: int, last: int = 0) -> PreTrainedModel:
    """The model with its first and last layers only, in place. Of the others, weights that were mapped from the
    checkpoint have never been read.
    """
    family = FAMILIES[model.config.model_type]
    decoder, count = getattr(model, family.decoder), model.config.num_hidden_layers
    kept = sorted({*range(first), *range(max(0, count - last), count)})
    layers = [decoder.layers[i] for i in kept]
    for index, layer in enumerate(layers):
        getattr(layer, family.attention).layer_idx = index
    decoder.layers = nn.ModuleList(layers)
    model.config.num_hidden_layers = len(layers)
    for name in OF_LAYERS:
        if of_layers := getattr(model.config, name, None):
            setattr(model.config, name, [of_layers[i] for i in kept])
    return model


class FrozenLayers:
    """Hidden states of a target, computed when they are asked for.

    Args:
        target: the model, or one cut down to its first layers, on any tier.
        start: N, for those that enter layer N; None: what leaves the final norm, the *features* that the output matrix
            and the heads of Medusa and EAGLE read.
        taps: before these, those that enter layers so numbered, ascending, side by side, as EAGLE-3's head reads them.
    """

    def __init__(self, target: Target, start: int | None = None, taps: Sequence[int] = ()) -> None:
        self.target, self.start, self.taps = target, start, tuple(taps)
        self.name = "-".join([*map(str, taps), "features" if start is None else f"layer-{start}"])
        self.width: int = (len(self.taps) + 1) * target.config.hidden_size

    @torch.no_grad()  # not inference mode: heads that learn keep what they read for their gradients
    def __call__(self, batch: Batch) -> Float[Tensor, "batch tokens width"]:
        target, ids = self.target, batch.ids.to(self.target.device)
        span, cache = Span(ids, np.zeros(len(ids), dtype=np.int64)), target.new_cache(*ids.shape)
        stop = target.num_layers if self.start is None else self.start
        hidden, seen = target.embed(span), []
        for first, last in pairwise((0, *self.taps, stop)):
            hidden = target.layers(hidden, span, cache, first, last)
            seen.append(hidden)
        seen[-1] = target.features(hidden) if self.start is None else hidden
        return torch.cat(seen, -1) if self.taps else seen[0]
