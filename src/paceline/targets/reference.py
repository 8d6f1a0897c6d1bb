"""The reference tier: Hugging Face's own modules, with our cache, masks and positions."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from paceline.errors import UnsupportedModel
from paceline.targets.adapters import without_wrapper
from paceline.targets.cache import CacheShape, CacheWindow, KVCache
from paceline.targets.families import FAMILIES, run_sublayers
from paceline.targets.layered import LayeredCache
from paceline.targets.layout import has_states, read_layout, sees_everything, small_windows
from paceline.targets.longrope import LongRopeTarget, crosses
from paceline.targets.ordered import OrderedTarget
from paceline.targets.proof import prove
from paceline.targets.rope import rotaries
from paceline.targets.stateful import StatefulTarget
from paceline.targets.target import Target
from paceline.targets.whole import WholeTarget

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paceline.targets.span import Span

log = logging.getLogger("paceline")


class BlockTarget(Target):
    """A model of the `FAMILIES`, layer by layer."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        super().__init__(model, tokenizer)
        self.family = FAMILIES[self.config.model_type]
        self.decoder = getattr(model, self.family.decoder)
        self.output = model.get_output_embeddings()  # by any name: transformers has changed some
        self.eager = model.config._attn_implementation == "eager"  # which knows no causal default
        # Layers that all see everything share one tensor and one mask.
        self.layout = {} if sees_everything(model, self.context) else read_layout(model, self.context)[0]

    def cache_shape(self) -> CacheShape:
        config = self.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return CacheShape(self.num_layers, kv_heads, head_dim)

    def embed(self, span: Span) -> Tensor:
        embedded: Tensor = getattr(self.decoder, self.family.embed)(span.ids)
        scale = self.family.number(self.config, self.family.embedding_scale)
        return embedded if scale == 1.0 else embedded * scale

    def layers(
        self,
        hidden: Tensor,
        span: Span,
        cache: KVCache,
        start: int,
        stop: int,
        skip: Collection[tuple[int, str]] = (),
        beside: Tensor | None = None,
    ) -> Tensor:
        positions = span.positions.clamp(max=self.context - 1)  # padding nodes may lie after the context's end
        masks = cache.masks(span, hidden.dtype) if isinstance(cache, LayeredCache) else {}
        arguments = {
            "attention_mask": None if masks else span.mask(hidden.dtype, explicit=self.eager),
            "position_ids": positions,
            "use_cache": True,
            self.family.cache_argument: CacheWindow(cache, span),
        }
        angles = {name: rotary(hidden, positions) for name, rotary in rotaries(self.decoder.rotary_emb).items()}
        for index in range(start, stop):
            layer = self.decoder.layers[index]
            arguments["position_embeddings"] = angles.get("") or angles[self.config.layer_types[index]]
            if masks:
                arguments["attention_mask"] = masks[self.layout[index].reach.name]
            attention, mlp = (index, "attention") not in skip, (index, "mlp") not in skip
            if attention and mlp:
                if beside is not None and index == start:
                    hidden = torch.cat([hidden, beside], -1)
                hidden = layer(hidden, **arguments)
            else:
                hidden = run_sublayers(self.family, layer, hidden, attention, mlp, **arguments)
        return hidden

    def features(self, hidden: Tensor) -> Tensor:
        features: Tensor = getattr(self.decoder, self.family.norm)(hidden)
        return features

    def logits(self, features: Tensor) -> Tensor:
        return self.family.adjusted(self.config, self.output(features))


def check_supported(model: PreTrainedModel) -> None:
    """Raises UnsupportedModel for what no tier runs: encoder-decoders, flash attention, models without a head."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{model.config.model_type} is an encoder-decoder, not a causal LM")
    if model.config._attn_implementation not in ("sdpa", "eager"):
        raise UnsupportedModel(
            f"attention implementation '{model.config._attn_implementation}' takes no tree mask: "
            "load the model with attn_implementation='sdpa'"
        )
    if not isinstance(getattr(model.config.get_text_config(), "num_hidden_layers", None), int):
        raise UnsupportedModel(
            f"{model.config.model_type} models have no number of layers in transformers, which makes no cache for them"
        )
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{type(model).__name__} has no output matrix: it is not a causal LM")


def as_target(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> Target:
    """The reference target of a Hugging Face model, proven to give what the model gives (`proof.prove`): its layers
    one by one if they are of a known family and nothing lies between them, else its whole forward.

    Raises:
        UnsupportedModel: what no tier runs, or a model that cannot verify drafts.
    """
    model = without_wrapper(model)
    check_supported(model)
    model.eval()
    if has_states(model):
        return _proven(StatefulTarget, model, tokenizer)
    if crosses(model):
        return _proven(LongRopeTarget, model, tokenizer)
    family = FAMILIES.get(model.config.model_type)
    if family and hasattr(model, family.decoder):
        try:
            return _proven(BlockTarget, model, tokenizer)
        except UnsupportedModel:  # a forward of its own, a hook around the decoder: the whole forward has them
            log.debug("%s does not run layer by layer", model.config.model_type, exc_info=True)
    try:
        return _proven(WholeTarget, model, tokenizer)
    except UnsupportedModel as error:  # it may count positions by its cache
        try:
            return _proven(OrderedTarget, model, tokenizer)
        except UnsupportedModel:
            raise error from None


def _proven(
    kind: type[BlockTarget | WholeTarget], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> Target:
    with small_windows(model) as smaller:
        target = kind(model, tokenizer)
        prove(target)
    return kind(model, tokenizer) if smaller else target
