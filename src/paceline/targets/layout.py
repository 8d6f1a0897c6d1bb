"""What each layer of a model keeps of a token, and for how long: asked of the model, by one token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from paceline.errors import UnsupportedModel
from paceline.targets.layered import LayerShape
from paceline.targets.reach import Reach

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import CacheLayerMixin

Layout = dict[int, LayerShape]


def sees_everything(model: PreTrainedModel, context: int) -> bool:
    """Whether every token of every layer sees all before it, as the configuration has it."""
    config = model.config.get_text_config()
    layers = DynamicCache(config=config).layers
    return all(type(layer) is DynamicLayer or _window(layer, context) is None for layer in layers)


@torch.inference_mode()
def read_layout(model: PreTrainedModel, context: int) -> Layout:
    """The model's layers, as the cache it makes for itself has them.

    Args:
        context: a window that is not smaller is none.

    Raises:
        UnsupportedModel: layers that keep anything but keys and values.
    """
    config = model.config.get_text_config()
    try:
        ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        cache = model(ids, use_cache=True).past_key_values
        layers = list(cache.layers)
    except Exception as error:
        raise UnsupportedModel(f"{config.model_type} models keep no key/value cache we know: {error}") from error
    names = getattr(config, "layer_types", None) or [None] * len(layers)
    return {
        index: _shape(config.model_type, layer, names[index] if index < len(names) else None, context)
        for index, layer in enumerate(layers)
        if not isinstance(layer, DummyLayer) and not _unused(layer)
    }


def is_uniform(layout: Layout) -> bool:
    """Whether one tensor holds the keys and values of all layers."""
    shapes = {(shape.reach.window, shape.keys, shape.values) for shape in layout.values()}
    window, keys, values = next(iter(shapes), (1, None, None))
    return len(shapes) == 1 and window is None and keys == values and list(layout) == list(range(len(layout)))


def _shape(model_type: str, layer: CacheLayerMixin, name: str | None, context: int) -> LayerShape:
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or layer.keys is None or layer.keys.dim() != 4:
        raise UnsupportedModel(f"{model_type}: layers that keep more than keys and values are not supported")
    window = _window(layer, context)
    name = name or ("full_attention" if type(layer) is DynamicLayer else "sliding_attention")
    keys, values = (tuple(part.shape[1::2]) for part in (layer.keys, layer.values))
    return LayerShape(Reach(name, window, name.startswith("chunked")), keys, values)


def _window(layer: CacheLayerMixin, context: int) -> int | None:
    window = getattr(layer, "sliding_window", None)
    return None if window is None or window >= context else int(window)


def _unused(layer: CacheLayerMixin) -> bool:
    """A layer that reads another's keys and values keeps none."""
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) and not layer.is_initialized
