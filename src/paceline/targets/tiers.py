"""How a target pass runs: the tiers, and which of them a model gets."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch

from paceline.errors import ModifiedModel, NativeUnavailable, OptionError, UnsupportedModel, require
from paceline.targets.adapters import without_wrapper
from paceline.targets.context import context_of
from paceline.targets.layout import layer_windows, small_windows
from paceline.targets.proof import Witness, check_agrees, witness
from paceline.targets.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paceline.targets.native import NativeTarget
    from paceline.targets.sources import ModelSource
    from paceline.targets.torch_tier import TorchTarget

#: How a target pass runs, as `module:function` of (model, tokenizer): one block view, the same results.
TIERS = {
    "reference": "paceline.targets.reference:as_target",  # Hugging Face's modules as they are
    "torch": "paceline.targets.torch_tier:make_torch_target",  # fused, prepacked, width-independent on CPU in float32
    "native": "paceline.targets.native:NativeTarget",  # C++ for the families of the table on CPU, built on first use
}
#: The torch tier's other forms: where exactness is given up (the native tier would gain nothing by it), and on a GPU.
INEXACT_TORCH = "paceline.targets.torch_tier:make_inexact_torch_target"
CUDA_TORCH = "paceline.targets.cuda_graphs:make_graph_target"
TORCH = "paceline.targets.torch_tier"
REFERENCE = "reference"
AUTO = "auto"  # the fastest tier that runs the model: what a model loaded by name gets

log = logging.getLogger("paceline")
GOING_ON = "%s; going on with the torch tier"


def make_target(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    tier: str = "reference",
    exact: bool | None = None,
    *,
    proven: bool = False,
) -> Target:
    """A target of a loaded model. Tiers other than "reference" take the model's weights over: it is of no use after.

    Where the native tier cannot be built, the torch tier takes its place, and a warning says so.

    Args:
        tier: one of `TIERS`, or "auto": the fastest that runs this model here.
        exact: True insists on `Target.exact`, False takes torch's own attention in the torch tier; None leaves it to
            the tier, which is exact wherever it can be.
        proven: nothing is compared with the model itself, on fast tiers: for layers that are no whole model.

    Raises:
        ModelError: a fast tier gives other logits than the model.
        OptionError: unknown tier, or one that cannot be exact though it must.
        UnsupportedModel: the tier or paceline cannot run this model.
    """
    check_tier(tier, exact)
    model = without_wrapper(model)
    if tier == AUTO:
        return _fastest(model, tokenizer, exact)
    module, _, function = _made_by(tier, model, exact).partition(":")
    make = getattr(import_module(module), function)
    if tier == REFERENCE:
        return cast("Target", make(model, tokenizer))
    import_module(module if tier != "torch" else TORCH).check_model(model)
    seen, small = (None, []) if proven else _witnessed(model)  # before its weights are taken
    try:
        target: Target = make(model, tokenizer)
    except NativeUnavailable as error:
        log.warning(GOING_ON, error)
        return make_target(model, tokenizer, "torch", exact, proven=proven)
    if seen is not None:
        _check(cast("NativeTarget | TorchTarget", target), seen, small)
    if exact and not target.exact:
        raise _not_exact(tier, target.exactness)
    return target


def _witnessed(model: PreTrainedModel) -> tuple[Witness, list[int]]:
    """What the model makes of a few tokens, with windows so small that these show how it uses them; and the windows."""
    with small_windows(model):
        return witness(model, noise=False), layer_windows(model, context_of(model.config.get_text_config())) or []


def _check(target: NativeTarget | TorchTarget, seen: Witness, small: list[int]) -> None:
    own, target.windows = target.windows, small
    check_agrees(target, seen)
    target.windows = own


def _fastest(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, exact: bool | None) -> Target:
    """Each tier refuses what it does not run before it takes any weight over."""
    try:
        tiers = ("native", "torch") if _native_pays(model, exact) else ("torch",)
    except NativeUnavailable as error:
        log.warning(GOING_ON, error)
        tiers = ("torch",)
    for tier in tiers:
        try:
            return make_target(model, tokenizer, tier, exact)
        except UnsupportedModel as error:
            refused = error
    if exact:
        raise UnsupportedModel(f"{refused}, which is not exact") from refused
    if isinstance(refused, ModifiedModel):
        log.warning("%s", refused)
    return make_target(model, tokenizer, "reference")


def _native_pays(model: PreTrainedModel, exact: bool | None) -> bool:
    """Whether the native tier runs this model as it is asked for, and with vector instructions.

    Raises NativeUnavailable when it would, but cannot be built.
    """
    if model.device.type != "cpu" or model.dtype not in (torch.float32, torch.bfloat16) or exact is False:
        return False
    from paceline.targets import native

    try:
        native.check_model(model)  # before anything is compiled for it
        return native.instruction_set() != "portable"
    except UnsupportedModel:
        return False


def _made_by(tier: str, model: PreTrainedModel, exact: bool | None) -> str:
    if tier == "torch" and model.device.type == "cuda":
        return CUDA_TORCH
    return INEXACT_TORCH if tier == "torch" and exact is False else TIERS[tier]


def load_target(
    name: str,
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    tier: str = AUTO,
    exact: bool | None = None,
    **options: Any,
) -> Target:
    """A target from a named model, hub id or folder; `options` as for `paceline.targets.sources.load_model`.

    Args:
        tier: see `make_target`.
        exact: see `make_target`.
    """
    from paceline.targets.sources import load_model

    check_tier(tier, exact)  # before a model is loaded
    if dtype in ("int8", torch.int8):
        require(tier in (AUTO, "native"), f"int8 is computed by the native tier, not by {tier}")
        floats = load_target(name, device=device, tier="native", exact=exact, **options)
        require(floats.tier == "native", "int8 is computed by the native tier, which cannot be built here")
        return cast("NativeTarget", floats).in_int8()
    if dtype in ("bfloat16", torch.bfloat16) and _in_tiles(_source_of_packed(name, None, device, tier, exact, options)):
        floats = load_target(name, device=device, tier=tier, exact=exact, **options)
        if floats.tier == "native" and cast("NativeTarget", floats).in_bfloat16().compute_dtype == torch.bfloat16:
            return floats
    source = _source_of_packed(name, dtype, device, tier, exact, options)
    if source and (started := _start_packed(source.location, tier)):
        return started
    facts = _made_from(source.location) if source else None
    target = _from_blocks(source, tier) if source else None
    if target is None:
        model, tokenizer = load_model(name, dtype=dtype, device=device, **options)
        target = make_target(model, tokenizer, tier, exact)
    if source and facts and target.tier == "native":
        from paceline.targets.native.start import keep

        keep(cast("NativeTarget", target), source.location, facts)
    return target


def _source_of_packed(
    name: str,
    dtype: torch.dtype | str | None,
    device: torch.device | str,
    tier: str,
    exact: bool | None,
    options: dict[str, Any],
) -> ModelSource | None:
    """Where the model is, if it is here and asked for as the native tier's packed weights are kept: on the CPU in
    float32, without adapters, quantisation or code of its own.
    """
    from paceline.targets.sources import resolve_local

    wanted = tier == "native" or (tier == AUTO and exact is not False)
    plain = dtype in (None, "float32", torch.float32) and str(device) == "cpu"
    special = any(value for option, value in options.items() if option not in ("progress", "merge_adapter"))
    if not wanted or not plain or special:
        return None
    from paceline.targets import native

    return resolve_local(name, weights=not native.possible())


def _in_tiles(source: ModelSource | None) -> bool:
    """Whether a model's blocks, as its file has them, are multiplied in bfloat16 by AMX."""
    if source is None or source.gguf is None:
        return False
    from paceline.targets.native import build

    return build.available() and build.instruction_set() == build.TILES


def _made_from(folder: str) -> dict[str, Any] | None:
    """What packed weights of this folder depend on; None where there is no native tier, or files come and go."""
    try:
        from paceline.targets.native.start import made_from

        return made_from(folder)
    except (NativeUnavailable, OSError):
        return None


def _start_packed(folder: str, tier: str) -> Target | None:
    """From packed weights, by the same decisions as from a model: None where the long way is to decide."""
    try:
        from paceline.targets import native
        from paceline.targets.native.start import file_of, start

        if not file_of(folder).exists() or (tier == AUTO and native.instruction_set() == "portable"):
            return None
        return start(folder)
    except NativeUnavailable:  # the long way warns of it
        return None


def _from_blocks(source: ModelSource, tier: str) -> Target | None:
    """From the GGUF file that a model comes from, without its weights in float32; by the same decisions and proof as
    from a model: None where the long way is to decide.
    """
    if source.gguf is None:
        return None
    from paceline.targets.native import NativeTarget, check_model, stored

    found = stored.load(source.location, source.gguf)
    if found is None:
        return None
    model, tokenizer, blocks = found
    try:
        if tier == AUTO and not _native_pays(model, exact=None):
            return None
        check_model(model)
        with stored.reading(model, blocks):
            seen, small = _witnessed(model)
        target = NativeTarget(model, tokenizer, "stored")
    except (NativeUnavailable, UnsupportedModel):  # the long way tells of it
        return None
    _check(target, seen, small)
    return target


def check_tier(tier: str, exact: bool | None = None) -> None:
    """Raises OptionError when there is no such tier, or when it is never exact and should be."""
    if tier not in (AUTO, *TIERS):
        raise OptionError(f"unknown tier '{tier}'; there are {', '.join((AUTO, *TIERS))}")
    if exact and tier == "reference":
        raise _not_exact(tier, Target.exactness)


def _not_exact(tier: str, why: str) -> OptionError:
    return OptionError(
        f"the {tier} tier cannot be exact here ({why}): on a CPU the native tier is in float32 and bfloat16, the torch "
        "tier in float32"
    )
