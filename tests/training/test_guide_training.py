"""Training a guide: it learns, and states that are stored change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from drafters.ngrams import discounted
from helpers import one_thread  # noqa: F401
from paceline.drafters.trigram.drafter import Trigram
from paceline.drafters.trigram.guide import Guide
from paceline.errors import OptionError
from paceline.targets.native import available
from paceline.targets.reference import as_target
from paceline.training.heads.guide import GuideOptions, prepare_guide
from paceline.training.heads.prepare import PreparedTraining, TrainingPlan
from paceline.training.trainer import TrainConfig, Trainer

pytestmark = pytest.mark.skipif(not available(), reason="needs a C++ compiler with OpenMP")

TRAIN = {"tokens": 200, "report": 20, "held_back": 4, "lr": 3e-3}


def assembled(model: Path, data: Path, **options: object) -> PreparedTraining:
    config = GuideOptions(**{"rank": 32, "inner": 32, "matrix": "none", "objective": "argmax", **options})
    return prepare_guide(str(model), [data], config, TrainingPlan(TrainConfig(**TRAIN), torch.device("cpu")))


def test_it_learns_and_can_be_used(tiny_model_dir: Path, tiny_data: Path, tmp_path: Path) -> None:
    made = assembled(tiny_model_dir, tiny_data)
    made.task.matrix = discounted([shard.ids.tolist() for shard in made.data.shards], 3, 257)
    config = TrainConfig(**TRAIN, epochs=8)
    trainer = Trainer(made.task, made.data, config, tmp_path, Accelerator(cpu=True), settings=made.settings)
    first: list[dict[str, float]] = []
    measured = trainer.run(lambda now: first.append(now.measured) if now.measured else None)
    assert measured["held_back_loss"] < first[0]["held_back_loss"]
    target = as_target(AutoModelForCausalLM.from_pretrained(tiny_model_dir))
    assert Guide.load(tmp_path, target).config.trained["measured"] == measured
    assert Trigram(target, guide=str(tmp_path)).taps == (target.num_layers,)


def test_stored_states_change_nothing(tiny_model_dir: Path, tiny_data: Path) -> None:
    losses = []
    for keep in (True, False):
        made = assembled(tiny_model_dir, tiny_data, stored=keep)
        losses.append(made.task.loss(made.data.batch([0, 1, 2])).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_text_that_the_model_was_not_asked_about(tiny_model_dir: Path, tiny_data: Path) -> None:
    """There likelier tokens are not known; nor do n-grams propose as many candidates as there may be."""
    made = assembled(tiny_model_dir, tiny_data, objective="distil")
    batch = made.data.batch([index for index in range(len(made.data)) if not made.data.generated[index]][:2])
    places = made.task.places(batch)
    assert (places.candidates < 0).any()
    loss = made.task.loss(batch).item()
    assert 0 < loss < float("inf")
    made.task.objective = "text"
    assert made.task.loss(batch).item() == loss


def test_one_goes_on_from_another(tiny_model_dir: Path, tiny_data: Path, tmp_path: Path) -> None:
    before = assembled(tiny_model_dir, tiny_data)
    with torch.no_grad():
        before.task.head.weigh.bias += 1
    before.task.head.save(tmp_path)
    after = assembled(tiny_model_dir, tiny_data, init=str(tmp_path)).task.head
    assert all(torch.equal(weight, after.state_dict()[name]) for name, weight in before.task.head.state_dict().items())
    with pytest.raises(OptionError, match="the head to go on from"):
        assembled(tiny_model_dir, tiny_data, init=str(tmp_path), rank=64)


def test_what_it_cannot_learn() -> None:
    with pytest.raises(OptionError, match="whole"):
        GuideOptions(objective="whole")
