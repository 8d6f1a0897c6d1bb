"""Whether the description of a model's family covers the model: what the fast tiers ask before they take it over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.errors import UnsupportedModel
from paceline.targets.context import context_of
from paceline.targets.families import FAMILIES, Family
from paceline.targets.layout import layer_windows
from paceline.targets.parts import ACTIVATIONS
from paceline.targets.plain_weights import check_plain
from paceline.targets.rope import rotaries

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # angles that depend on the position only


def check_described(model: PreTrainedModel, tier: str) -> None:
    """Raises UnsupportedModel, in the name of a tier, where the family's description does not cover the model: an
    unknown family, a setting that changes what layers compute, or weights that it does not mention; and ModifiedModel
    as `check_plain` does.
    """
    config: Any = model.config.get_text_config()
    family = FAMILIES.get(model.config.model_type)  # of texts alone: others keep their decoder elsewhere
    if family is None or not hasattr(model, family.decoder):
        raise unsupported(tier, f"models of type {model.config.model_type}")
    decoder: Any = getattr(model, family.decoder)
    activation, ropes = getattr(config, family.activation, None), rotaries(decoder.rotary_emb).values()
    kinds = [getattr(rope, "rope_type", None) for rope in ropes]
    settings = {name: getattr(config, name, None) for name in family.without}
    refuse(
        tier,
        {
            f"activation {activation}": activation not in ACTIVATIONS,
            **{f"rotary embeddings of type {kind}": kind not in STATIC_ROPE for kind in kinds},
            "rotations of several sizes": len({rope.inv_freq.numel() for rope in ropes}) > 1,
            "layers with states, or that see chunks": layer_windows(model, context_of(config)) is None,
            **{f"{name}={value}": value for name, value in settings.items()},
        },
    )
    check_plain(model)
    refuse(tier, dict.fromkeys((f"weights called {name}" for name in _unknown_weights(family, decoder)), True))


def refuse(tier: str, reasons: Mapping[str, object]) -> None:
    """Raises UnsupportedModel for the first reason that is so."""
    for reason, found in reasons.items():
        if found:
            raise unsupported(tier, reason)


def unsupported(tier: str, what: str) -> UnsupportedModel:
    return UnsupportedModel(f"the {tier} tier does not support {what}: use the reference tier")


def _unknown_weights(family: Family, decoder: Any) -> list[str]:
    """Parameters of layers that no part of the description uses; one of each name."""
    experts = family.experts
    norms = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
    owned = {family.attention: (*family.qkv, family.out, family.query_norm, family.key_norm, family.sinks)}
    owned[family.mlp] = (*family.up, family.down)
    known: set[tuple[str, ...]] = {(name,) for norm in norms if (name := getattr(family, norm))}
    known |= {(owner, name) for owner, names in owned.items() for name in names}
    if experts:
        known |= {(family.mlp, name) for name in (experts.router, experts.shared_gate) if name}
        known |= {
            (family.mlp, experts.experts, f"{name}_proj{bias}")
            for name in ("gate_up", "down")
            for bias in ("", "_bias")
        }
        if experts.shared:
            known |= {(family.mlp, experts.shared, name) for name in owned[family.mlp]}
    found = dict.fromkeys(name for layer in decoder.layers for name, _ in layer.named_parameters())
    return [name for name in found if _owner(name) not in known]


def _owner(parameter: str) -> tuple[str, ...]:
    parts = tuple(parameter.split("."))
    return parts[:-1] if parts[-1] in ("weight", "bias") else parts
