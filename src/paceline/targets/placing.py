"""How weights are held: spread over devices, quantised while they load, with which attention."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from paceline.errors import OptionError, UnsupportedModel, first_line, require

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ATTENTION = ("sdpa", "eager")  # that take a tree's mask
#: Short names of quantisations, as transformers' `quantization_config` writes them, and the package that does it.
QUANTIZATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "bnb-8bit": ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "bnb-4bit": ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "quanto-int8": ("optimum.quanto", {"quant_method": "quanto", "weights": "int8"}),
}
#: What transformers needs to read a quantised checkpoint, as `import` names it and as `pip install` does.
READERS = {
    "gptq": {"optimum": "optimum", "gptqmodel": "gptqmodel"},
    "awq": {"gptqmodel": "gptqmodel"},
    "bitsandbytes": {"bitsandbytes": "bitsandbytes"},
    "compressed-tensors": {"compressed_tensors": "compressed-tensors"},
    "quanto": {"optimum": "optimum-quanto"},
    "torchao": {"torchao": "torchao"},
}


def check_readable(config: PretrainedConfig, name: str) -> None:
    """Raises UnsupportedModel for a quantised checkpoint whose packages are not there."""
    asked: Any = getattr(config, "quantization_config", None) or {}
    method = asked.get("quant_method") if isinstance(asked, dict) else getattr(asked, "quant_method", None)
    packages = READERS.get(str(getattr(method, "value", method)), {})
    if missing := [package for module, package in packages.items() if find_spec(module) is None]:
        raise UnsupportedModel(f"the weights of {name} are quantised, and need pip install {' '.join(missing)}")


def how_to_load(
    device_map: str | dict[str, Any] | None, quantization_config: Any, attn_implementation: str | None
) -> dict[str, Any]:
    """Keyword arguments of `from_pretrained` for what was asked; texts are read as `--device-map` and the like are.

    Raises:
        OptionError: an unknown name, JSON that cannot be read, or a package that is not there.
    """
    require(
        attn_implementation in (None, *ATTENTION),
        f"attention implementation {attn_implementation!r} takes no tree mask: use {' or '.join(ATTENTION)}",
    )
    how = {
        "device_map": _json(device_map, "device map") if device_map is not None else None,
        "quantization_config": _quantization(quantization_config) if quantization_config is not None else None,
        "attn_implementation": attn_implementation,
    }
    return {name: value for name, value in how.items() if value is not None}


def _quantization(asked: Any) -> Any:
    """A configuration object of transformers': as it is, or made from a short name, JSON or a dictionary."""
    if isinstance(asked, str) and not asked.lstrip().startswith("{"):
        require(asked in QUANTIZATIONS, f"unknown quantization {asked!r}: use JSON or {', '.join(QUANTIZATIONS)}")
        package, asked = QUANTIZATIONS[asked]
        root = package.partition(".")[0]
        require(find_spec(root) is not None, f"this quantization needs {root}: pip install {package.replace('.', '-')}")
    asked = _json(asked, "quantization")
    if not isinstance(asked, dict):
        return asked
    from transformers.quantizers.auto import AutoQuantizationConfig

    try:
        return AutoQuantizationConfig.from_dict(asked)
    except Exception as error:  # whatever a quantiser's configuration may raise
        raise OptionError(f"cannot use this quantization: {first_line(error)}") from error


def _json(text: Any, what: str) -> Any:
    if not (isinstance(text, str) and text.lstrip().startswith("{")):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise OptionError(f"the {what} is not JSON: {error}") from error


def rounds_activations(model: PreTrainedModel) -> bool:
    """Whether a quantiser rounds what enters its products, by each pass anew: a last bit there becomes one of eight."""
    config: Any = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    groups: dict[str, Any] = getattr(getattr(config, "quantization_config", config), "config_groups", None) or {}
    return (
        bool(getattr(config, "load_in_8bit", False))  # LLM.int8
        or getattr(config, "activations", None) is not None  # quanto
        or "Activation" in type(getattr(config, "quant_type", None)).__name__  # torchao
        or str(getattr(config, "quant_method", "")).rpartition(".")[2].lower() in ("fp8", "fbgemm_fp8", "fp_quant")
        or any(getattr(group, "input_activations", None) is not None for group in groups.values())  # compressed-tensors
    )


def device_of(model: PreTrainedModel) -> torch.device:
    """Where its inputs go and its logits come from. Weights that are kept elsewhere move there for their product.

    Raises:
        UnsupportedModel: layers on several accelerators.
    """
    spread: dict[str, Any] = getattr(model, "hf_device_map", None) or {}
    kind = getattr(torch.accelerator.current_accelerator(), "type", "cuda")  # of devices given by number
    names = (f"{kind}:{place}" if isinstance(place, int) else str(place) for place in spread.values())
    places = {name for name in names if name not in ("cpu", "disk")}
    if len(places) > 1:
        raise UnsupportedModel(
            f"the layers lie on {', '.join(sorted(places))}: paceline runs models on one accelerator, others may hold "
            "none of its layers (device_map='cuda:0', or CPU and disk beside it)"
        )
    if places:
        return torch.device(places.pop())
    return torch.device("cpu") if spread else model.device
