"""What each layer of a model keeps of a token, and for how long: asked of the model, by one token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from paceline.errors import UnsupportedModel
from paceline.targets.cache import CacheShape
from paceline.targets.layered import LayerShape, Layout
from paceline.targets.reach import Reach

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import CacheLayerMixin

KINDS = ("full_attention", "sliding_attention", "chunked_attention")
PLAIN = (DynamicLayer, DynamicSlidingWindowLayer)  # they keep keys and values
WINDOWS = ("sliding_window", "attention_chunk_size")  # as configurations call them


@contextmanager
def small_windows(model: PreTrainedModel, size: int = 4) -> Iterator[None]:
    """The model with windows of this size at most, so that a few tokens show how it uses them."""
    config = model.config.get_text_config()
    before = {name: getattr(config, name, None) for name in WINDOWS}
    for name, window in before.items():
        if isinstance(window, int):
            setattr(config, name, min(window, size))
    try:
        yield
    finally:
        for name, window in before.items():
            if isinstance(window, int):
                setattr(config, name, window)


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
    if "local" in (getattr(config, "attention_layers", None) or ()):
        raise UnsupportedModel(f"{config.model_type} with local attention counts its window by slot, not by position")
    names = getattr(config, "layer_types", None) or [None] * len(layers)
    return {
        index: _shape(config.model_type, layer, names[index] if index < len(names) else None, context)
        for index, layer in enumerate(layers)
        if not isinstance(layer, DummyLayer) and not _unused(layer)
    }


def uniform_shape(layout: Layout) -> CacheShape | None:
    """The shape of the one tensor that holds the keys and values of all layers, if one does."""
    shapes = {(shape.reach.window, shape.keys, shape.values) for shape in layout.values()}
    if len(shapes) != 1 or list(layout) != list(range(len(layout))):
        return None
    window, keys, values = shapes.pop()
    return CacheShape(len(layout), *keys) if window is None and keys == values else None


def _shape(model_type: str, layer: CacheLayerMixin, name: str | None, context: int) -> LayerShape:
    parts = layer.keys, layer.values
    if type(layer) not in PLAIN or any(part is None or part.dim() != 4 for part in parts):
        raise UnsupportedModel(f"{model_type}: layers that keep more than keys and values are not supported")
    window = _window(layer, context)
    name = name or KINDS[window is not None]
    if name not in KINDS:
        raise UnsupportedModel(f"{model_type}: {name.replace('_', ' ')} layers are not supported")
    keys, values = ((part.shape[1], part.shape[3]) for part in parts if part is not None)
    return LayerShape(Reach(name, window, name.startswith("chunked")), keys, values)


def _window(layer: object, context: int) -> int | None:
    window = getattr(layer, "sliding_window", None)
    return None if window is None or window >= context else int(window)


def _unused(layer: CacheLayerMixin) -> bool:
    """A layer that reads another's keys and values keeps none."""
    return type(layer) in PLAIN and not layer.is_initialized
