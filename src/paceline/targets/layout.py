"""What the layers of a model keep: keys and values of tokens, or a state. Asked of the model, by one token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from paceline.errors import UnsupportedModel, first_line
from paceline.targets.cache import CacheShape
from paceline.targets.layered import LayerShape, Layout
from paceline.targets.placing import device_of
from paceline.targets.reach import Reach
from paceline.targets.states import DummyLayer, LayerState, States

if TYPE_CHECKING:
    from transformers import PreTrainedModel
#: Under which name a model looks up the mask of a type of layer that attends.
KINDS = {name: name for name in ("full_attention", "sliding_attention", "chunked_attention")}
KINDS |= {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
KNOWN = (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
WINDOWS = ("sliding_window", "attention_chunk_size")  # as configurations call them


@contextmanager
def small_windows(model: PreTrainedModel, size: int = 4) -> Iterator[bool]:
    """The model with windows of this size at most, so that a few tokens show how it uses them; whether it has any."""
    config = model.config.get_text_config()
    before = {name: window for name in WINDOWS if isinstance(window := getattr(config, name, None), int)}
    for name, window in before.items():
        setattr(config, name, min(window, size))
    try:
        yield bool(before)
    finally:
        for name, window in before.items():
            setattr(config, name, window)


def sees_everything(model: PreTrainedModel, context: int) -> bool:
    """Whether every token of every layer sees all before it, as the configuration has it."""
    if getattr(model.config.get_text_config(), "num_hidden_layers", None) == 0:  # of a head without any of its own
        return True
    plain, layers = (DynamicLayer, DynamicSlidingWindowLayer), _configured(model)
    return bool(layers) and all(type(layer) in plain and _window(layer, context) is None for layer in layers)


def layer_windows(model: PreTrainedModel, context: int) -> list[int] | None:
    """By layer: how many tokens a token sees, itself included, as the configuration has it; 0: all before it.

    None where layers do something else: keep states, or cut the text into chunks.
    """
    config = model.config.get_text_config()
    if config.num_hidden_layers == 0:  # of a head without any of its own
        return []
    plain, layers = (DynamicLayer, DynamicSlidingWindowLayer), _configured(model)
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others or len(layers) != config.num_hidden_layers or any(type(layer) not in plain for layer in layers):
        return None
    return [_window(layer, context) or 0 for layer in layers]


def has_states(model: PreTrainedModel) -> bool:
    """Whether layers keep a state of all that came before, as the configuration has it."""
    states = any(isinstance(layer, LinearAttentionLayer) for layer in _configured(model))
    return states or cache_argument(model) == "cache_params"


def _configured(model: PreTrainedModel) -> list[Any]:
    """The layers of a cache, as transformers makes them of a configuration; none of types that it does not know."""
    try:
        return list(DynamicCache(config=model.config.get_text_config()).layers)
    except KeyError:
        return []


def cache_argument(model: PreTrainedModel) -> str:
    """What the model's forward, and its output, call the cache: Mamba has a name of its own for it."""
    return "cache_params" if "cache_params" in signature(model.forward).parameters else "past_key_values"


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether the model's forward names positions among its arguments: `generate` then gives them."""
    return "position_ids" in signature(model.forward).parameters


@torch.inference_mode()
def read_layout(model: PreTrainedModel, context: int) -> tuple[Layout, States]:
    """What each layer keeps of a token, and its state before the first: as in the cache the model makes for itself.

    Args:
        context: a window that is not smaller is none.

    Raises:
        UnsupportedModel: layers that keep anything else.
    """
    config = model.config.get_text_config()
    try:
        ids = torch.zeros(1, 1, dtype=torch.long, device=device_of(model))
        out = model(ids, use_cache=True)
    except Exception as error:
        raise UnsupportedModel(
            f"{config.model_type} models do not run with a cache, in transformers: {first_line(error)}"
        ) from error
    cache = getattr(out, cache_argument(model), None)
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", None)  # encoder-decoders keep two
    if layers is None:
        raise UnsupportedModel(
            f"{config.model_type} models keep no cache of keys and values in transformers, only "
            + (f"{type(cache).__name__}, from which nothing can be taken back" if cache else ", ".join(out))
        )
    names = getattr(config, "layer_types", None) or [None] * len(layers)
    layout: dict[int, LayerShape] = {}
    states: dict[int, LayerState] = {}
    for index, layer in enumerate(layers):
        if type(layer) not in KNOWN:
            raise UnsupportedModel(f"{config.model_type}: layers that keep a {type(layer).__name__} are not supported")
        if isinstance(layer, LinearAttentionLayer):
            kinds = layer.conv_states, layer.recurrent_states
            states[index] = LayerState(
                *({n: torch.zeros_like(part) for n, part in kind.items() if part is not None} for kind in kinds)
            )
        if getattr(layer, "keys", None) is not None:
            name = names[index] if index < len(names) else None
            layout[index] = layer_shape(config.model_type, layer, name, context)
    if len({shape.reach.name for shape in layout.values()}) != len({shape.reach for shape in layout.values()}):
        raise UnsupportedModel(
            f"{config.model_type}: layers of one type with windows of several sizes are not supported"
        )
    if has_states(model) and not states:
        raise UnsupportedModel(
            f"{config.model_type} models keep their states elsewhere than in the layers of the cache: transformers' "
            f"{type(cache).__name__} cannot take tokens back"
        )
    return layout, states


def uniform_shape(layout: Layout) -> CacheShape | None:
    """The shape of the one tensor that holds the keys and values of all layers, if one does."""
    shapes = {(shape.reach.window, shape.keys, shape.values) for shape in layout.values()}
    if len(shapes) != 1 or list(layout) != list(range(len(layout))):
        return None
    window, keys, values = shapes.pop()
    return CacheShape(len(layout), *keys) if window is None and keys == values else None


def layer_shape(model_type: str, layer: Any, name: str | None, context: int) -> LayerShape:
    """What a layer of a cache keeps of a token, by the keys and values that are in it; `name`: of its type."""
    window = _window(layer, context)
    name = name or ("full_attention" if window is None else "sliding_attention")
    if name not in KINDS or layer.keys.dim() != 4:
        raise UnsupportedModel(f"{model_type}: {name.replace('_', ' ')} layers are not supported")
    name = KINDS[name]
    keys, values = ((part.shape[1], part.shape[3]) for part in (layer.keys, layer.values))
    return LayerShape(Reach(name, window, name.startswith("chunked")), keys, values)


def _window(layer: object, context: int) -> int | None:
    window = getattr(layer, "sliding_window", None)
    return None if window is None or window >= context else int(window)
