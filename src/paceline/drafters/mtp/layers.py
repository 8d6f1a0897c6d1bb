"""The layers for multi-token prediction that stand in a model's own checkpoint, as transformers reads them.

transformers knows their form (`MtpModel`), but of few models whether they have any: this asks the configuration under
the names that it has elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.drafting.budget import AUTO
from paceline.drafting.heads import placed
from paceline.errors import CheckpointError, OptionError, UnsupportedModel, first_line
from paceline.targets.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.modeling_layers import MtpModel

#: What configurations call the number of these layers: transformers, Qwen 3.5, DeepSeek and GLM.
COUNTS = ("num_mtp_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers")
#: Architectures whose configuration does not tell it.
UNTOLD = {"qwen3_next": 1}
ATTENDS = "full_attention"  # what a layer does that is beside others which keep states


def count_mtp_layers(target: Target) -> int:
    """How many of these layers a model was published with, as its configuration has it."""
    config = target.config
    told = (getattr(config, name, None) for name in COUNTS)
    return next((count for count in told if isinstance(count, int)), UNTOLD.get(config.model_type, 0))


def take_mtp(head: str | Path | MtpModel, target: Target) -> MtpModel:
    """The layers as the drafter is given them, ready to run on the target's device: "auto": those of the target's own
    files; a folder or hub id of a model: of that one's; or, from Python, themselves.

    Raises:
        OptionError: the model has none.
        UnsupportedModel: transformers, or this tier, cannot run them.
        CheckpointError: the files lack them, or do not fit the model.
    """
    count = count_mtp_layers(target) if head == AUTO else count_mtp_layers(target) or 1
    if not count:
        raise OptionError(
            f"mtp: {target.name} was published without layers for multi-token prediction, as its configuration has it; "
            "name a model that has them, as in mtp:head=FOLDER"
        )
    if target.tier != "reference":
        raise UnsupportedModel(f"mtp runs on the reference tier, and {target.name} was loaded on {target.tier}")
    made = _read(target, head, count) if isinstance(head, str | Path) else head
    for module in (made.layers, getattr(made, "shared_post_norm", None)):  # what is the target's own stays
        if module is not None:
            placed(module, target.device, target.dtype)
    made.eval().requires_grad_(False)
    return made


def _read(target: Target, head: str | Path, count: int) -> MtpModel:
    name = target.model.config.name_or_path if head == AUTO else head
    if not name:
        raise CheckpointError(f"mtp: {target.name} was not read from files: name them, as in mtp:head=FOLDER")
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError as error:
        raise UnsupportedModel("mtp needs transformers 5.23 or newer") from error
    from paceline.targets.loading import quiet  # which take seconds, and `auto` knows this module
    from paceline.targets.sources import resolve

    source = resolve(name)
    try:
        with _described(target.model, source.location, count), quiet():
            return MtpModel.from_pretrained(target.model)
    except Exception as error:  # of many kinds: files, shapes, what a configuration lacks
        raise CheckpointError(f"mtp: {name} holds no layers for {target.name}: {first_line(error)}") from error


@contextmanager
def _described(model: PreTrainedModel, folder: str, count: int) -> Iterator[None]:
    """The model with all that `MtpModel` wants to know of it: which files, how many layers, of which kind and type, and
    which of the tensors are theirs.
    """
    config = model.config.get_text_config()
    number = config.num_hidden_layers
    told: dict[str, Any] = {"num_mtp_layers": count, "mtp_layer_types": _kinds(config, "layer_types", count)}
    told["mtp_mlp_layer_types"] = _kinds(config, "mlp_layer_types", count)
    wanted = {name: value for name, value in told.items() if value and not getattr(config, name, None)}
    # Beside others under one name, or counted on from the model's own layers.
    patterns = [r"(^|\.)mtp\.", *(rf"(^|\.)layers\.{index}\." for index in range(number, number + count))]
    files = {"_name_or_path": folder, "dtype": model.dtype}
    tensors = {"_keys_to_ignore_on_load_unexpected": patterns}
    with _set(config, wanted), _set(model.config, files), _set(model, tensors):
        yield


def _kinds(config: PreTrainedConfig, name: str, count: int) -> list[str] | None:
    """The kind of each of the layers, where the model's own are of several: one that attends, as its last one does."""
    kinds = getattr(config, name, None)
    return ([ATTENDS if ATTENDS in kinds else kinds[-1]] * count) if kinds else None


@contextmanager
def _set(owner: Any, values: dict[str, Any]) -> Iterator[None]:
    """These attributes for a while."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)
