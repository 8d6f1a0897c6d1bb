"""From a model's name and folders of data to a head on the target's features that the trainer takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.drafters.eagle.head import EagleHead
from paceline.drafters.medusa.head import MedusaHead
from paceline.drafting.heads import TrainedHead, with_blocks
from paceline.targets.sources import load_as_stored
from paceline.targets.target import Target, as_target
from paceline.targets.tokenizers import fingerprint
from paceline.training.data.dataset import Dataset, frequent_tokens
from paceline.training.heads.adversarial import Adversarial, AdversarialOptions, Discriminator
from paceline.training.heads.eagle import Eagle, EagleOptions
from paceline.training.heads.feature_store import FeatureStore
from paceline.training.heads.frozen_layers import Frozen, FrozenLayers
from paceline.training.heads.head_task import FeatureTask, HeadOptions
from paceline.training.heads.initial_weights import fit_eagle, fit_medusa
from paceline.training.heads.medusa import Medusa, MedusaOptions, break_symmetry
from paceline.training.heads.prepare import Assembled, How, facts, fast, parameters
from paceline.training.task import Task


class Setting(NamedTuple):
    """A target, in float32, and what its heads learn from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    target: Target
    data: Dataset
    tokens: list[int] | None  # that the head can draft
    dtype: torch.dtype  # of the checkpoint
    total: int  # parameters of the model


def medusa(
    name: str, folders: Sequence[Path], config: MedusaOptions, how: How, adversarial: AdversarialOptions | None = None
) -> Assembled:
    """Medusa heads to train for the model called `name`, on the data of `folders`; errors as of `early_exit`."""
    setting = _setting(name, folders, config)
    head = MedusaHead.from_target(
        setting.model,
        heads=config.heads,
        layers=config.layers,
        vocabulary=config.vocabulary,
        tokens=setting.tokens,
    )
    break_symmetry(head, how.training.seed)

    def task(features: Frozen, matrix: Tensor) -> Medusa:
        return Medusa(head, features, config.objective, matrix)

    return _assembled(setting, head, fit_medusa, task, config, how, adversarial)


def eagle(
    name: str, folders: Sequence[Path], config: EagleOptions, how: How, adversarial: AdversarialOptions | None = None
) -> Assembled:
    """An EAGLE head, as `medusa`."""
    setting = _setting(name, folders, config)
    head = EagleHead.from_target(setting.model, config.layers, tokens=setting.tokens, seed=how.training.seed)

    def task(features: Frozen, matrix: Tensor) -> Eagle:
        return Eagle(head, features, config, matrix, how.training.seed)

    return _assembled(setting, head, fit_eagle, task, config, how, adversarial)


def _setting(name: str, folders: Sequence[Path], config: HeadOptions) -> Setting:
    model, tokenizer = load_as_stored(name)
    data = Dataset(*folders, max_length=config.max_length, tokenizer=fingerprint(tokenizer))
    total, dtype = parameters(model), model.dtype
    target = as_target(model.float())  # for a fingerprint that does not depend on how training computes
    tokens = frequent_tokens(data.frequencies(target.vocab_size), config.vocab, target.eos)
    return Setting(model, tokenizer, with_blocks(target, "a head on the model's features"), data, tokens, dtype, total)


def _assembled(
    setting: Setting,
    head: TrainedHead,
    fit: Callable[[Any, Frozen, Dataset, Sequence[int]], None],
    task: Callable[[Frozen, Tensor], FeatureTask],
    config: HeadOptions,
    how: How,
    adversarial: AdversarialOptions | None,
) -> Assembled:
    model, data, (training, device, tier, at_home, told) = setting.model, setting.data, how
    home = head.stored_path(setting.target) / f"k{config.layers}{'-adv' if adversarial else ''}"
    at_home(home)
    dtype = torch.float32 if device.type == "cpu" else setting.dtype
    head.to(device)
    matrix, embeddings = (
        _rows(part, head, device) for part in (model.get_output_embeddings(), model.get_input_embeddings())
    )
    layers = FrozenLayers(fast(nn.Module.to(model, device, dtype), setting.tokenizer, tier))
    features = FeatureStore(layers, data, head.fingerprint, config.store_limit, told) if config.stored else layers
    fit(head, features, data, data.split(training.held_back)[0])
    learner: Task
    made = learner = task(features, matrix)
    settings = {"model": head.config.target, "data": data.digest, **facts(config)}
    if adversarial:
        discriminator = Discriminator(adversarial.form, adversarial.layers, embeddings, training.seed).to(device)
        learner = Adversarial(made, discriminator, adversarial)
        settings["adversarial"] = asdict(adversarial)
    loaded = setting.total + parameters(learner.module)
    return Assembled(learner, data, home, settings, loaded, setting.total)


def _rows(part: Any, head: TrainedHead, device: torch.device) -> Float[Tensor, "vocab hidden"]:
    rows = part.weight.detach()
    rows = rows if head.tokens is None else rows[head.tokens.to(rows.device)]
    return rows.float().to(device, copy=True)
