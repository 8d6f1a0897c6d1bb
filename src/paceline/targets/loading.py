"""From files to a model in memory, with transformers' failures told in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers.utils import logging as hf_logging

from paceline.errors import (
    DiskFull,
    IntegrityError,
    ModelError,
    OptionError,
    PacelineError,
    UnsupportedModel,
    first_line,
)
from paceline.files import is_full
from paceline.targets.placing import check_readable

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# transformers' auto classes are imported where they are used: they take seconds.

_TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken", "tekken.json")


def load(
    location: str,
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype | str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    bars: bool = False,
    how: dict[str, Any] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The causal language model of a folder or hub id, in eval mode, and its tokenizer; see `sources.load_model`.

    Args:
        how: further arguments of `from_pretrained`, see `placing.how_to_load`.
    """
    from transformers import AutoTokenizer

    how = how or {}
    where: dict[str, Any] = {"pretrained_model_name_or_path": location, "revision": revision}
    where["trust_remote_code"] = trust_remote_code
    with quiet(bars=bars):
        config = read_model_config(name, **where)
        require_causal(config, name, trust_remote_code)
        check_readable(config, name)
        folder = Path(location)
        if folder.is_dir() and not any(True for pattern in _TOKENIZER_FILES for _ in folder.glob(pattern)):
            raise ModelError(f"{name} has no tokenizer: put its tokenizer.json into {location}")
        with _one_line(name, "tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(**where)
        with _one_line(name, "weights"):
            model = read_weights(name, **where, config=config, dtype=dtype, use_safetensors=True, **how)
    if "device_map" not in how and getattr(model, "hf_quantizer", None) is None:  # else they are where they should be
        torch.nn.Module.to(model, device)  # transformers' own `to` hides its signature from type checkers
    return model.eval(), tokenizer


def read_model_config(name: str, **where: Any) -> PretrainedConfig:
    """`AutoConfig.from_pretrained(**where)`. Raises ModelError where there is none that transformers takes."""
    from transformers import AutoConfig

    with _one_line(name, "config"):
        config: PretrainedConfig = AutoConfig.from_pretrained(**where)
    return config


def placement(dtype: torch.dtype | str | None, device: torch.device | str) -> tuple[torch.dtype | str, torch.device]:
    """What the user asked for as torch knows it; a dtype of None is float32 on the CPU, else the checkpoint's own.

    Raises `OptionError` for an unknown dtype, or a device that is not there.
    """
    try:
        place = torch.device(device)
        torch.empty(0, device=place)  # a device that exists by name only fails here
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise OptionError(f"cannot use device {str(device)!r}: {first_line(error)}") from error
    if dtype is None:
        return (torch.float32 if place.type == "cpu" else "auto"), place
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise OptionError(f"unknown dtype {dtype!r}: use float32, bfloat16, float16, float64 or (native tier) int8")
    return kind, place


def read_weights(name: str, **where: Any) -> PreTrainedModel:
    """`AutoModelForCausalLM.from_pretrained(**where)`, or that of models of texts and images where the configuration
    names one. Weights that are missing or of another size, which it fills at random, are an error.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as SEEING

    seeing = not set(where["config"].architectures or ()).isdisjoint(SEEING.values()) if "config" in where else False
    loaded: Any = (AutoModelForImageTextToText if seeing else AutoModelForCausalLM).from_pretrained(
        **where,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # its own error points to a report that nobody sees
    )
    model: PreTrainedModel = loaded[0]
    info = loaded[1]
    if info["missing_keys"]:
        raise IntegrityError(f"{name} lacks weights, among them {min(info['missing_keys'])}")
    if info["mismatched_keys"]:
        weight, found, wanted = min(info["mismatched_keys"])
        raise IntegrityError(
            f"{name} has weights of other sizes than its configuration says: {weight} is {_size(found)}, "
            f"not {_size(wanted)}"
        )
    return model


def _size(shape: torch.Size) -> str:
    return " x ".join(map(str, shape))


def require_causal(config: PretrainedConfig, name: str, trust_remote_code: bool = False) -> None:
    """Raise `UnsupportedModel` unless `config` describes a decoder with a language-modelling head."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as SEEING
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

    heads = config.architectures or []
    ours = config.model_type in CAUSAL and (not heads or not set(CAUSAL.values()).isdisjoint(heads))
    ours = ours or (config.model_type in SEEING and SEEING[config.model_type] in heads)  # texts are what it is used for
    own_code = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    # BERT and its kin have a causal class on paper, but read both sides unless they are made decoders
    encoder = config.model_type in MASKED and not getattr(config, "is_decoder", False)
    if not (ours or own_code) or encoder or getattr(config, "is_encoder_decoder", False):
        what = heads[0] if heads else config.model_type
        raise UnsupportedModel(f"{name} is not a causal language model, but {what}")
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers < 1:
        raise UnsupportedModel(f"{name} has {layers} layers, as its configuration says: it needs one at least")


@contextlib.contextmanager
def quiet(*, bars: bool = False) -> Iterator[None]:
    """Nothing below errors from transformers, and no progress bars of its own unless `bars`."""
    level, had_bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    if not bars:
        hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if had_bars:
            hf_logging.enable_progress_bar()


@contextlib.contextmanager
def _one_line(name: str, what: str) -> Iterator[None]:
    """transformers raises anything from KeyError to RuntimeError for files it cannot use: one line instead."""
    try:
        yield
    except PacelineError:
        raise
    except (SafetensorError, EOFError) as error:
        raise IntegrityError(f"the weights of {name} are damaged: {first_line(error)}") from error
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if is_full(error):  # while the hub's files come in
            raise DiskFull(f"the disk is full: could not fetch {name}") from error
        raise ModelError(f"cannot load the {what} of {name}: {first_line(error)}") from error
