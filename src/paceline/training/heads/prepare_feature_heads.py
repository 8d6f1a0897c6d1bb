"""What the heads on the target's features (Medusa, EAGLE, DFlash) share on the way to the trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.drafters.eagle.eagle3_head import BESIDE, Eagle3Head
from paceline.drafting.heads import TrainedHead, placed, with_blocks
from paceline.errors import require
from paceline.targets.families import Adjustment, embedding_matrix, output_matrix
from paceline.targets.reference import as_target
from paceline.targets.sources import load_as_stored
from paceline.training.data.dataset import Dataset, frequent_tokens
from paceline.training.heads.adversarial import Adversarial, AdversarialOptions, Discriminator
from paceline.training.heads.feature_store import FeatureStore
from paceline.training.heads.frozen_layers import FrozenLayers, HiddenStates
from paceline.training.heads.initial_weights import fit_entry
from paceline.training.heads.prepare import (
    PreparedTraining,
    TrainingPlan,
    facts,
    fast,
    go_on,
    parameters,
    training_data,
    warn_of_strangers,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paceline.targets.target import Target
    from paceline.training.heads.head_task import FeatureTask, HeadOptions
    from paceline.training.task import Task


class FrozenModel(NamedTuple):
    """A target, in float32, and what its heads learn from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    target: Target
    data: Dataset
    tokens: Sequence[int] | None  # that the head can draft
    init: TrainedHead | None  # a trained head to go on from
    dtype: torch.dtype  # of the checkpoint
    total: int  # parameters of the model


def frozen_model(name: str, folders: Sequence[Path], config: HeadOptions, kind: type[TrainedHead]) -> FrozenModel:
    """The model called `name` for a head of this kind, on the data of `folders`.

    Raises:
        ModelError, UnsupportedModel: the model cannot be found, or its layers do not run one by one.
        DataError: the data is missing, damaged, or another tokenizer's.
    """
    model, tokenizer = load_as_stored(name)
    data = training_data(folders, config, tokenizer)
    total, dtype = parameters(model), model.dtype
    target = as_target(model.float())  # for a fingerprint that does not depend on how training computes
    target = with_blocks(target, "a head on the model's features")
    init, tokens = None, frequent_tokens(data.frequencies(target.vocab_size), config.vocab, target.eos)
    if config.init:
        init = kind.load(config.init, target)
        tokens = None if init.tokens is None else init.tokens.tolist()
    return FrozenModel(model, tokenizer, target, data, tokens, init, dtype, total)


def prepared(
    frozen: FrozenModel,
    head: TrainedHead,
    fit: Callable[[Any, HiddenStates, Dataset, Sequence[int]], None],
    make_task: Callable[[HiddenStates, Tensor], FeatureTask],
    config: HeadOptions,
    plan: TrainingPlan,
    adversarial: AdversarialOptions | None,
    taps: Sequence[int] = (),
) -> PreparedTraining:
    """The head with what the trainer takes, once it has the weights that it begins with.

    Args:
        fit: gives a new head these.
        make_task: from the target's features and the output matrix's rows.
        taps: hidden states that the head reads; none: features.
    """
    model, data, (training, device, tier, at_home, stored, _) = frozen.model, frozen.data, plan
    samples = data.split(training.held_back)[0]  # before what takes long: they may be too few,
    if frozen.init:  # and it may not fit
        go_on(head, frozen.init)
    home = head.stored_path(frozen.target) / f"k{config.layers}{'-adv' if adversarial else ''}"
    at_home(home)
    warn_of_strangers(data, head.config.target)
    dtype = plan.dtype(frozen.dtype)
    head.to(device)
    matrix, embeddings = (_rows(part, head, device) for part in (output_matrix(model), embedding_matrix(model)))
    adjusted = Adjustment.of(model)
    layers = FrozenLayers(fast(placed(model, device, dtype), frozen.tokenizer, tier), taps=taps)
    features = FeatureStore(layers, data, head.fingerprint, config.store_limit, stored) if config.stored else layers
    if frozen.init is None:
        fit(head, features, data, samples)
    elif isinstance(head, Eagle3Head) and isinstance(frozen.init, Eagle3Head) and _reads_other(head, frozen.init):
        before = frozen.init.to(device)
        before.embedding = head.embedding
        both = sorted({*head.reads, *before.reads})
        fit_entry(head, before, both, FrozenLayers(layers.target, taps=both), data, samples)
    learner: Task
    made = learner = make_task(features, matrix)
    made.adjusted = adjusted
    settings = {"model": head.config.target, "data": data.digest, **facts(config)}
    if adversarial:
        discriminator = Discriminator(adversarial.form, adversarial.layers, embeddings, training.seed).to(device)
        learner = Adversarial(made, discriminator, adversarial)
        settings["adversarial"] = asdict(adversarial)
    loaded = frozen.total + parameters(learner.module)
    return PreparedTraining(learner, data, home, settings, loaded, frozen.total)


def _reads_other(head: Eagle3Head, before: Eagle3Head) -> bool:
    """Whether other states of the target enter a head than the one that it goes on from."""
    mine, theirs = head.config, before.config
    fits = head.token_in is not None or mine.shallow == theirs.shallow
    require(fits, f"a head with --token {BESIDE} cannot go on from one with another --shallow")
    return (mine.taps, mine.shallow) != (theirs.taps, theirs.shallow)


def _rows(rows: Tensor, head: TrainedHead, device: torch.device) -> Float[Tensor, "vocab hidden"]:
    rows = rows if head.tokens is None else rows[head.tokens.to(rows.device)]
    return rows.float().to(device, copy=True)
