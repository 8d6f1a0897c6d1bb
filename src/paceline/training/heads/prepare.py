"""From a model's name and a folder of data to what the trainer takes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from paceline.errors import UnsupportedModel, require
from paceline.targets import make_target
from paceline.targets.tokenizers import fingerprint
from paceline.training.data.dataset import Dataset
from paceline.training.objectives import TEXT, WHOLE

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paceline.drafting.heads import TrainedHead
    from paceline.targets.target import Target
    from paceline.training.task import TaskOptions
    from paceline.training.trainer import TrainConfig

log = logging.getLogger("paceline")


class PreparedTraining(NamedTuple):
    """A task with its data, and the parameters of the model it is for."""

    task: Any  # a `Task` with a `head`
    data: Dataset
    home: Path  # where the drafter is found if it is written there
    settings: dict[str, Any]  # all that the result depends on, besides the trainer's configuration
    loaded: int  # of the frozen layers, with their embedding, and of the head
    total: int  # of the whole target


class TrainingPlan(NamedTuple):
    """How a head is trained, whatever its kind.

    Attributes:
        tier: which computes the frozen layers.
        at_home: told where the head would be found, before anything takes long.
        stored: told of how many tokens the states have been stored, of how many.
        half: the frozen layers compute in bfloat16 on a CPU, too, as the head's products do.
    """

    training: TrainConfig
    device: torch.device
    tier: str | None = None
    at_home: Callable[[Path], None] = lambda home: None
    stored: Callable[[int, int], None] = lambda done, of: None
    half: bool = False

    def dtype(self, stored: torch.dtype) -> torch.dtype:
        """Of the frozen layers of a checkpoint that is `stored` so."""
        if self.device.type != "cpu":
            return stored
        return torch.bfloat16 if self.half else torch.float32


def training_data(folders: Sequence[Path], config: TaskOptions, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """What a head learns from.

    Raises:
        DataError: the data is missing, damaged, or another tokenizer's.
        OptionError: it does not tell what the objective needs.
    """
    data = Dataset(*folders, max_length=config.max_length, tokenizer=fingerprint(tokenizer))
    told = config.objective in (TEXT, WHOLE) or data.shards[0].top_ids.shape[1] > 0
    others = " or ".join(config.without_probabilities)
    require(
        told, f"the data has no probabilities, which {config.objective} learns (see --top): give --objective {others}"
    )
    return data


def warn_of_strangers(data: Dataset, model: str) -> None:
    """Where another model than the head's wrote the data; one by another name may be the same."""
    if others := sorted({str(manifest["made"].get("model", model)) for manifest in data.manifests} - {model}):
        log.warning("The data was written by %s, and the head is for %s.", ", ".join(others), model)


def go_on(head: TrainedHead, before: TrainedHead) -> None:
    """Take the weights of a head that is trained already.

    Raises:
        OptionError: it is another than what the options ask for.
    """
    wanted, given = ({name: weight.shape for name, weight in one.state_dict().items()} for one in (head, before))
    require(wanted == given, "the head to go on from has other layers than the options ask for")
    head.load_state_dict(before.state_dict())


def facts(config: Any) -> dict[str, Any]:
    """What a configuration says of the result."""
    return {name: value for name, value in asdict(config).items() if name != "store_limit"}


def parameters(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def fast(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tier: str | None) -> Target:
    """On the tier asked for, or the fastest that runs the model. Nothing here needs exactness."""
    try:
        return make_target(model, tokenizer, tier or "torch", exact=False)
    except UnsupportedModel:
        if tier is not None:
            raise
        return make_target(model, tokenizer)
