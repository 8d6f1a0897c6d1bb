"""An exit head as a model of its own: the target's first N layers, the exit layers, norm and output matrix are a plain
Hugging Face model of N + E layers, for drafting without shared layers: here, in transformers or in vLLM.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.drafters.early_exit.head import ExitHead
from paceline.errors import UnsupportedModel, first_line
from paceline.files import share_weights, whole_folder
from paceline.targets.families import FAMILIES, OF_LAYERS, Experts, Family
from paceline.targets.loading import quiet
from paceline.targets.reference import as_target
from paceline.targets.span import Span
from paceline.targets.target import Target

FAR = 40.0  # below the mean logit lie the logits of tokens that the head does not know
LEAST = 0.25  # of a constant that should be 1: below it is none
RIDGE = 1e-3
LONG = 200  # letters of what torch says


def export_draft_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, head: ExitHead, out: Path
) -> PreTrainedModel:
    """Write the draft model and its tokenizer to the new folder `out`, which appears complete or not at all.

    Raises:
        OptionError: there is something in `out`.
        CheckpointMismatch: the head was made for another model.
        DiskFull: there is no room.
    """
    with whole_folder(out) as folder, quiet():
        draft = draft_model(model, head)
        draft.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        share_weights(folder)
    return draft


def draft_model(model: PreTrainedModel, head: ExitHead) -> PreTrainedModel:
    """The draft model, sharing the weights of both; only good for saving.

    Raises:
        CheckpointMismatch: the head was made for another model.
        UnsupportedModel: no configuration of this family describes the target's layers and the head's.
    """
    target = as_target(model)
    head.check(target)
    start, layers = head.config.start, head.config.start + head.config.exit_layers
    config: Any = copy.deepcopy(model.config)
    config.num_hidden_layers, config.tie_word_embeddings = layers, False
    for name in OF_LAYERS:  # the head's layers are of the kinds that it has them of
        if of_layers := getattr(config, name, None):
            setattr(config, name, [*of_layers[:start], *getattr(head.lm.config, name)[: head.config.exit_layers]])
    family = FAMILIES[config.model_type]
    if family.experts and hasattr(config, "mlp_only_layers"):  # which layers have experts goes by their numbers
        config.mlp_only_layers, config.decoder_sparse_step = _dense_layers(family, family.experts, model, head), 1
    with torch.device("meta"):
        draft = type(model)(config)
    own, exits = f"{family.decoder}.layers.", head.lm.state_dict()
    inputs, outputs = (
        next(name for name, part in model.named_modules() if part is embeddings)
        for embeddings in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    kept = tuple(f"{own}{layer}." for layer in range(start))
    state = {name: weight for name, weight in model.state_dict().items() if name.startswith((inputs, *kept))}
    for name, weight in exits.items():
        if name.startswith(own):
            layer, _, rest = name.removeprefix(own).partition(".")
            state[f"{own}{start + int(layer)}.{rest}"] = weight
        elif name.startswith(f"{family.decoder}."):  # the norm
            state[name] = weight
    state[f"{outputs}.weight"] = matrix = output_matrix(head, target) / family.logits_factor(config)
    if f"{outputs}.bias" in draft.state_dict():  # Phi's, which heads do without
        state[f"{outputs}.bias"] = matrix.new_zeros(len(matrix))
    try:
        draft.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise UnsupportedModel(
            f"a {type(model).__name__} cannot have this head's layers after its own: {first_line(error)[:LONG]}"
        ) from error
    draft.generation_config = model.generation_config
    return draft


def _dense_layers(family: Family, experts: Experts, model: Any, head: ExitHead) -> list[int]:
    """Numbers of the draft model's layers that have no experts."""
    layers = [*getattr(model, family.decoder).layers[: head.config.start], *head.decoder.layers]
    mlps = [getattr(layer, family.mlp) for layer in layers]
    return [number for number, mlp in enumerate(mlps) if not hasattr(mlp, experts.experts)]


@torch.no_grad()
def output_matrix(head: ExitHead, target: Target) -> Float[Tensor, "vocab hidden"]:
    """The head's output matrix in full.

    A matrix has no logit of minus infinity for the tokens that a trimmed head does not know. Their rows are all the
    mean of the others, whose logit is the mean logit and so never the largest, less a row whose logit is much the
    same for everything the model reads, where there is such a row: most models' hidden states have a constant part.
    """
    matrix: Tensor = head.lm.get_output_embeddings().weight
    if head.lift is not None:
        matrix = head.lift.weight @ matrix
    if head.tokens is None:
        return matrix
    states = _states(head, target).double()
    moments = states.T @ states / len(states)
    moments.diagonal().add_(RIDGE * moments.diagonal().mean())
    constant = torch.linalg.solve(moments, states.mean(0))
    row = matrix.double().mean(0)
    if (states @ constant).min() > LEAST:
        row -= FAR * constant
    full = row.to(matrix.dtype).repeat(target.vocab_size, 1)
    full[head.tokens] = matrix
    return full


def _states(head: ExitHead, target: Target) -> Float[Tensor, "tokens hidden"]:
    """What enters the output matrix over random tokens."""
    shape = (8, min(256, target.context))
    ids = torch.randint(target.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(target.device)
    span, cache = Span(ids, np.zeros(len(ids), dtype=np.int64)), target.new_cache(*shape)
    entering = target.layers(target.embed(span), span, cache, 0, head.config.start)
    return head.states(entering).flatten(0, 1)
