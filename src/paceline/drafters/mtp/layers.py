"""The layer for multi-token prediction that stands in a model's own checkpoint, as transformers reads it.

transformers knows the form (`MtpModel`), but of few models whether they have any: this asks the configuration under
the names that it has elsewhere. Of several layers the first is read.
"""

from __future__ import annotations

from copy import copy, deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.drafting.heads import placed
from paceline.errors import CheckpointError, OptionError, UnsupportedModel, first_line, require
from paceline.registry import AUTO
from paceline.targets.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_layers import MtpModel

#: What configurations call the number of these layers: transformers, Qwen 3.5, DeepSeek and GLM.
COUNTS = ("num_mtp_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers")
#: Architectures that have one, though their configuration does not tell it.
UNTOLD = ("qwen3_next",)
ATTENDS = "full_attention"  # what a layer does that is beside others which keep states


def has_mtp_layer(target: Target) -> bool:
    """Whether a model was published with such a layer, as its configuration has it."""
    config = target.config
    told = (getattr(config, name, None) for name in COUNTS)
    return next((count > 0 for count in told if isinstance(count, int)), config.model_type in UNTOLD)


def take_mtp(head: str | Path | MtpModel, target: Target) -> MtpModel:
    """The layer as the drafter is given it, ready to run on the target's device: "auto": that of the target's own
    files; a folder or hub id of a model: of that one's; or, from Python, itself.

    Raises:
        OptionError: the model has none, or what is given is none.
        UnsupportedModel: transformers, or this tier, cannot run it.
        CheckpointError: the files lack it, or it does not fit the model.
    """
    if head == AUTO and not has_mtp_layer(target):
        raise OptionError(
            f"mtp: {target.name} was published without a layer for multi-token prediction, as its configuration has "
            "it; name a model that has one, as in mtp:head=FOLDER"
        )
    if target.tier != "reference":
        raise UnsupportedModel(f"mtp runs on the reference tier, and {target.name} was loaded on {target.tier}")
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError as error:
        raise UnsupportedModel("mtp needs transformers 5.23 or newer") from error
    if isinstance(head, str | Path):
        return _read(MtpModel, target, head)
    require(isinstance(head, MtpModel), f"mtp: head must be a folder, a hub id or an MtpModel, not {head!r}")
    own, size = head.config.hidden_size, target.config.hidden_size
    require(own == size, f"mtp: the layer given has states of size {own}, the model of {size}")
    return _ready(head, target)


def _read(kind: type[MtpModel], target: Target, head: str | Path) -> MtpModel:
    from paceline.targets.loading import quiet  # which takes seconds, and `auto` knows this module

    folder, name = _folder(target, head), target.name if head == AUTO else head
    try:
        with quiet():
            return _ready(kind.from_pretrained(_described(target.model, folder)), target)
    except Exception as error:  # of many kinds: files, shapes, what a configuration lacks, memory
        why = first_line(error).partition(": [")[0]  # of which the names of all tensors would follow
        raise CheckpointError(f"mtp: {name} holds no layer for {target.name}: {why}") from error


def _folder(target: Target, head: str | Path) -> str:
    """Where the files are, or the hub id that fetches them."""
    from huggingface_hub import try_to_load_from_cache

    from paceline.targets.loading import read_model_config
    from paceline.targets.sources import resolve

    name = target.model.config.name_or_path if head == AUTO else head
    if not name:
        what = f"{target.name} was not read from files: name them" if head == AUTO else "name the folder"
        raise OptionError(f"mtp: {what}, as in mtp:head=FOLDER")
    commit = getattr(target.model.config, "_commit_hash", None) if head == AUTO else None
    # The revision that was loaded lies in the hub's cache as a whole.
    cached = try_to_load_from_cache(str(name), "config.json", revision=commit) if commit else None
    folder = str(Path(cached).parent) if isinstance(cached, str) else resolve(name).location
    if getattr(read_model_config(str(name), pretrained_model_name_or_path=folder), "quantization_config", None):
        raise UnsupportedModel(f"mtp: the weights of {name} are quantised, and its layer cannot be read")
    return folder


def _ready(made: MtpModel, target: Target) -> MtpModel:
    """On the target's device and in its type; what is the target's own stays as it is."""
    for module in (made.layers, getattr(made, "shared_post_norm", None)):
        if module is not None:
            placed(module, target.device, target.dtype).eval().requires_grad_(False)
    return made


def _described(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    """The model with all that `MtpModel` wants to know of it: where the files are, that one layer is wanted and of
    which kind, in which type, and which tensors are its own. The model that was given stays as it is.
    """
    described = copy(model)
    described.config = deepcopy(model.config)
    described.config.name_or_path, described.config.dtype = folder, model.dtype
    config = described.config.get_text_config()
    config.num_mtp_layers = 1
    for name in ("layer_types", "mlp_layer_types"):
        kinds = getattr(config, name, None) or [None]
        likely = ATTENDS if ATTENDS in kinds else kinds[-1]
        own = getattr(config, f"mtp_{name}", None) or ([likely] if likely else None)
        setattr(config, f"mtp_{name}", own and own[:1])
    known = [pattern for pattern in model._keys_to_ignore_on_load_unexpected or () if "mtp" in pattern]
    counted_on = rf"^(model\.)?(language_model\.)?(model\.)?layers\.{config.num_hidden_layers}\."
    described._keys_to_ignore_on_load_unexpected = [*known, r"(^|\.)mtp\.", counted_on]
    return described
