"""Decoder layers that a head has of its own: modules of its target's family, which run as fast as the target does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from paceline.targets import make_target
from paceline.targets.families import FAMILIES
from paceline.targets.linear import PackedLinear, PlainLinear, can_pack, quicken
from paceline.targets.llama_layers import LlamaLayers, LlamaShape
from paceline.targets.reference import BlockTarget
from paceline.targets.target import Target

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

#: Of the target's configuration: what its layers do not depend on.
_LEFT_OUT = (
    *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "quantization_config"),
    *("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
)


def layers_config(config: PretrainedConfig, layers: int) -> dict[str, Any]:
    """The target's configuration with another number of layers, and nothing done before or after them."""
    kept = {key: value for key, value in config.to_diff_dict().items() if key not in _LEFT_OUT}
    if "layer_types" in kept:
        kept["layer_types"] = kept["layer_types"][:1] * layers  # of the first's kind
    kept |= FAMILIES[config.model_type].of_layers()
    return kept | {"num_hidden_layers": layers, "tie_word_embeddings": False}


def make_layers(config: dict[str, Any], outputs: int) -> PreTrainedModel:
    """A causal LM of a `layers_config` without word embeddings, with random weights: transformers' modules, or those of
    `llama_layers` where they do, which need seconds less to import.

    Args:
        outputs: rows of its output matrix; 0: it has none.
    """
    shape = LlamaShape.of(config)
    lm = cast("PreTrainedModel", LlamaLayers(shape)) if shape else _of_transformers(config)
    kind = lm.config
    kind.vocab_size = outputs  # only now: two matrices of this size would have been made at random
    lm.set_input_embeddings(nn.Identity())
    lm.set_output_embeddings(nn.Linear(kind.hidden_size, outputs, bias=False) if outputs else nn.Identity())
    lm.eval()
    return lm


def _of_transformers(config: dict[str, Any]) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(config)
    no_ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    kind = AutoConfig.for_model(fields.pop("model_type"), vocab_size=1, **no_ids, **fields)
    lm: PreTrainedModel = AutoModelForCausalLM.from_config(kind)
    return lm


def fast_layers(lm: PreTrainedModel, target: Target) -> Target:
    """What `make_layers` made, behind the block view of the target's own tier, which takes its weights over."""
    # Tiers take over whole models; this one is entered after its embedding.
    lm.set_input_embeddings(nn.Embedding(1, lm.config.hidden_size, dtype=target.dtype, device=target.device))
    if target.tier == "reference":
        return BlockTarget(lm)
    # The native tier reads the shape of its attention off a layer.
    if target.tier != "native" or lm.config.num_hidden_layers == 0:
        return make_target(lm, tier="torch", proven=True)
    from paceline.targets.native import NativeTarget

    made = NativeTarget(lm, storage="rounded")  # the least to read, and drafts need not be exact
    made.native.round_inputs()
    return made


def fast_linear(
    weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None, target: Target, output: bool = False
) -> Callable[[Float[Tensor, "rows in"]], Float[Tensor, "rows out"]]:
    """A linear layer of a head, as fast as the target's tier has it; `output`: it makes logits."""
    if target.tier == "native":
        from paceline.targets.native.linear import RoundedLinear

        return RoundedLinear(weight, bias, output)
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not can_pack():
        return PlainLinear(weight, bias)
    linear = PackedLinear(weight, bias)
    quicken([linear], linear.probe())
    return linear
