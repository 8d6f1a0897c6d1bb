"""An MTP layer at work: transformers' own module, with our cache, masks and positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache

from paceline.drafting.stepping.forward import SteppingForward
from paceline.targets.cache import CacheWindow, KVCache
from paceline.targets.layered import LayeredCache, LayerShape
from paceline.targets.layout import layer_shape
from paceline.targets.span import Span
from paceline.targets.target import FEATURES, PREFILL_CHUNK, Target

if TYPE_CHECKING:
    from transformers import Cache
    from transformers.modeling_layers import MtpModel


class MtpForward(SteppingForward):
    """The first of a model's MTP layers, step after step: the target's feature at position t and the embedding of token
    t + 1, each normed, go through one matrix and one layer like the target's. What comes out tells token t + 2 by the
    target's output matrix, and stands for the feature in the next step.

    It was trained on whole texts, so it looks back far.
    """

    tail = PREFILL_CHUNK

    def __init__(self, layers: MtpModel, target: Target) -> None:
        super().__init__(target, (target.num_layers if target.has_blocks else FEATURES,))
        self.mtp = layers
        kinds = getattr(layers.config, "layer_types", None)
        self._kind = kinds[0] if kinds else None
        self._shape = self._ask_shape()

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return LayeredCache.of({0: self._shape}, batch, capacity, self.target.dtype, self.target.device)

    def features(self, states: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        return states

    def head(self, states: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        logits: Tensor = self.mtp._project_to_logits(states)  # with all that the model does to its own
        return logits

    def fused(self, taps: Sequence[Float[Tensor, "batch width hidden"]]) -> Float[Tensor, "batch width hidden"]:
        return self.target.features(taps[0]) if self.target.has_blocks else taps[0]

    def run_layers(
        self, states: Float[Tensor, "batch width hidden"], span: Span, cache: KVCache, tokens: Tensor | None
    ) -> Float[Tensor, "batch width hidden"]:
        assert isinstance(cache, LayeredCache)
        (mask,) = cache.masks(span, states.dtype).values()
        return self._step(states, span, mask, CacheWindow(cache, span))

    def _step(
        self, states: Float[Tensor, "batch width hidden"], span: Span, mask: Tensor | None, cache: Cache
    ) -> Float[Tensor, "batch width hidden"]:
        embedded, angles = self.mtp.embed_tokens(span.ids), None
        if self.mtp.rotary_emb is not None:
            own: dict[str, Any] = {"layer_type": self._kind} if self.mtp.has_per_layer_rope else {}
            angles = self.mtp.rotary_emb(embedded, position_ids=span.positions, **own)
        made: Tensor = self.mtp.layers[0](
            embedded,
            states,
            position_embeddings=angles,
            attention_mask=mask,
            position_ids=span.positions,
            past_key_values=cache,
        )
        return self.mtp.shared_post_norm(made) if self.mtp.use_shared_post_norm else made

    @torch.inference_mode()
    def _ask_shape(self) -> LayerShape:
        """What the layer keeps of a token: asked of it, by one token."""
        device, size = self.target.device, self.target.config.hidden_size
        cache = DynamicCache(config=self.mtp.config)
        ids = torch.zeros(1, 1, dtype=torch.long, device=device)
        states = torch.zeros(1, 1, size, dtype=self.target.dtype, device=device)
        self._step(states, Span(ids, np.zeros(1, dtype=np.int64)), None, cache)
        return layer_shape(self.target.config.model_type, cache.layers[0], self._kind, self.target.context)
