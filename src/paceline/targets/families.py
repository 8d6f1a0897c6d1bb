"""Where each model family keeps its parts: the adapter table of the block view."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Family:
    """Attribute names of a `...ForCausalLM` and of its decoder layers."""

    decoder: str = "model"
    embed: str = "embed_tokens"
    norm: str = "norm"
    attention: str = "self_attn"
    cache_argument: str = "past_key_values"
    parallel_residual: bool = False  # the layer's config may say: attention and MLP both read the layer's input


LLAMA = Family()
NEOX = Family(
    decoder="gpt_neox",
    embed="embed_in",
    norm="final_layer_norm",
    attention="attention",
    cache_argument="layer_past",
    parallel_residual=True,
)

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,  # and SmolLM, SmolLM2, TinyLlama, Vicuna, ...
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gpt_neox": NEOX,  # Pythia
}


def run_sublayers(
    family: Family, layer: Any, hidden: Tensor, attention: bool, mlp: bool, **arguments: object
) -> Tensor:
    """A decoder layer with its attention or MLP sublayer left out (the residual passes by it).

    For a layer that runs whole call the layer itself; this is for layer-skipping drafts.
    """

    def attend(x: Tensor) -> Tensor:
        attended: Tensor = getattr(layer, family.attention)(layer.input_layernorm(x), **arguments)[0]
        return attended

    def transform(x: Tensor) -> Tensor:
        transformed: Tensor = layer.mlp(layer.post_attention_layernorm(x))
        return transformed

    if family.parallel_residual and layer.use_parallel_residual:
        out = hidden
        if attention:
            out = out + attend(hidden)
        return out + transform(hidden) if mlp else out
    if attention:
        hidden = hidden + attend(hidden)
    return hidden + transform(hidden) if mlp else hidden
