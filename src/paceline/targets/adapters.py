"""Models with PEFT's adapters: what they are for a target, and adapters by path."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline.errors import ModelError, OptionError, UnknownModel, UnsupportedModel, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILES = ["adapter_config.json", "adapter_model.safetensors"]


def without_wrapper(model: Any) -> PreTrainedModel:
    """The transformers model inside a PEFT model, with the adapters that are injected into its modules.

    Raises:
        UnsupportedModel: adapters that are not in modules: prompt tuning and its kin, which put inputs of their own
            before a text.
    """
    if not (hasattr(model, "peft_config") and hasattr(model, "get_base_model")):
        return cast("PreTrainedModel", model)
    active: Any = model.active_peft_config
    if active.is_prompt_learning:
        kind = str(getattr(active.peft_type, "value", active.peft_type)).lower().replace("_", " ")
        raise UnsupportedModel(
            f"PEFT's {kind} puts inputs of its own before a text, which paceline does not: use adapters of weights, "
            "such as LoRA"
        )
    return cast("PreTrainedModel", model.get_base_model())


def load_adapter(model: PreTrainedModel, adapter: str, merge: bool = True) -> PreTrainedModel:
    """The model with the adapter of a folder or hub id: added to its weights, or beside them where these are quantised.

    Args:
        merge: False keeps adapters beside the weights; the reference tier then runs them.

    Raises:
        OptionError: PEFT is not installed.
        UnknownModel, ModelError, UnsupportedModel: there is no such adapter, or it is not one for this model.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise OptionError("adapters need peft: pip install peft") from error
    folder = _folder(adapter)
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise ModelError(f"the adapter {adapter} has no {' and no '.join(missing)}")
    try:
        adapted = PeftModel.from_pretrained(cast("Any", model), str(folder))
    except Exception as error:  # KeyError to RuntimeError, for what does not fit
        raise ModelError(f"the adapter {adapter} does not fit this model: {first_line(error)}") from error
    base = without_wrapper(adapted)
    if merge and getattr(base, "hf_quantizer", None) is None:
        base = cast("PreTrainedModel", adapted.merge_and_unload())
    base.eval()
    return base


def _folder(adapter: str) -> Path:
    if Path(adapter).is_dir():
        return Path(adapter)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(adapter, allow_patterns=FILES))
    except Exception as error:  # whatever the hub's library raises for names, networks and rights
        raise UnknownModel(
            f"there is no adapter {adapter!r}, as a folder or on the hub: {first_line(error)}"
        ) from error
