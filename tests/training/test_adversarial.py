"""Adversarial learning: the game of KOALA's eq. 5 and 6, who learns when, collapse, equilibrium."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.nn import functional

from helpers import one_thread  # noqa: F401
from paceline.errors import OptionError
from paceline.training.heads.adversarial import LONG, Adversarial, AdversarialOptions, Discriminator
from paceline.training.heads.medusa import MedusaOptions, prepare_medusa
from paceline.training.heads.prepare import TrainingPlan
from paceline.training.trainer import TrainConfig, Trainer

CPU = torch.device("cpu")


def game(model: Path, data: Path, config: TrainConfig, **options: object) -> Adversarial:
    head = MedusaOptions(heads=2, vocab=60)
    return prepare_medusa(
        str(model), [data], head, TrainingPlan(config, CPU), AdversarialOptions(**{"weight": 0.3, **options})
    ).task  # type: ignore[arg-type]


def play(task: Adversarial, data: Path, config: TrainConfig, out: Path) -> dict[str, float]:
    from paceline.training.data.dataset import Dataset

    return Trainer(task, Dataset(data), config, out, Accelerator(cpu=True)).run()


@pytest.mark.parametrize("form", ["full", "low-cost"])
def test_losses_are_those_of_the_paper(form: str, tiny_model_dir: Path, tiny_data: Path) -> None:
    from paceline.training.data.dataset import Dataset

    task = game(tiny_model_dir, tiny_data, TrainConfig(), form=form, layers=2)
    batch = Dataset(tiny_data).batch([3, 9])
    drafts = task.task.drafts(batch)
    assert drafts.logits.shape[1] == 60
    seen_as_real = task.discriminator(drafts.hidden, task.discriminator.given(drafts.logits)).sigmoid()
    truth = drafts.truth.each(drafts.truth.features)
    real = task.discriminator(drafts.hidden, task.discriminator.given(task.task.truth(truth))).sigmoid()
    want = drafts.loss - 0.3 * (drafts.weights * seen_as_real.log()).sum()
    torch.testing.assert_close(task.loss(batch), want)
    want = -(drafts.weights * ((1 - seen_as_real).log() + real.log())).sum()
    torch.testing.assert_close(task.discriminator_loss(batch), want)


@pytest.mark.parametrize("form", ["full", "low-cost"])
def test_the_discriminator_learns_to_tell(form: str) -> None:
    """Logits that say what follows the hidden state from logits that say something else."""
    drawn = torch.Generator().manual_seed(0)
    matrix = torch.randn(30, 8, generator=drawn)
    judge = Discriminator(form, 1, matrix, seed=0)
    optimizer = torch.optim.Adam(judge.parameters(), 1e-2)
    for _ in range(200):
        seen = torch.randn(64, 8, generator=drawn)
        real, other = (x @ matrix.T for x in (seen, torch.randn(64, 8, generator=drawn)))
        verdicts = judge(seen, judge.given(real)), judge(seen, judge.given(other))
        loss = functional.softplus(-verdicts[0]).mean() + functional.softplus(verdicts[1]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert ((verdicts[0] > 0).float().mean() + (verdicts[1] < 0).float().mean()) / 2 > 0.85
    torch.testing.assert_close(judge.given(real + 5.0), judge.given(real), rtol=1e-4, atol=1e-4)  # it is the same


def test_players_take_turns(tiny_model_dir: Path, tiny_data: Path, tmp_path: Path) -> None:
    """In its turn each changes, and the other does not; both learn."""
    config = TrainConfig(epochs=2, tokens=300, report=5, held_back=4, lr=3e-3)
    task = game(tiny_model_dir, tiny_data, config, lr=0.5)
    seen: list[tuple[str, bool, bool]] = []

    def state() -> list[torch.Tensor]:
        return [torch.cat([w.detach().flatten() for w in player.module.parameters()]) for player in task.players]

    before = state()
    for name in ("loss", "discriminator_loss"):
        own = getattr(task, name)

        def noted(batch: object, name: str = name, own: object = own) -> object:
            nonlocal before
            now = state()
            seen.append((name, *(bool((a != b).any()) for a, b in zip(before, now, strict=True))))
            before = now
            return own(batch)  # type: ignore[operator]

        setattr(task, name, noted)
    config = TrainConfig(steps=4, accumulate=1, tokens=300, report=5, held_back=4, lr=3e-3)
    play(task, tiny_data, config, tmp_path)
    assert seen == [
        ("loss", False, False),
        ("discriminator_loss", True, False),
        *[("loss", False, True), ("discriminator_loss", True, False)] * 3,
    ]


def test_what_is_measured(tiny_model_dir: Path, tiny_data: Path, tmp_path: Path) -> None:
    config = TrainConfig(epochs=3, tokens=300, report=50, held_back=4, lr=3e-3)
    measured = play(game(tiny_model_dir, tiny_data, config, lr=3.0), tiny_data, config, tmp_path)
    assert 0.5 < measured["discriminator_accuracy"] <= 1
    assert measured["discriminator_held_back_loss"] < 2 * math.log(2)
    assert (tmp_path / "metrics.jsonl").read_text().count('"discriminator_loss"') > 5
    assert not any("discriminator" in name for name in load_file(tmp_path / "medusa.safetensors"))


def test_collapse_is_told_once(tiny_model_dir: Path, tiny_data: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = game(tiny_model_dir, tiny_data, TrainConfig())
    with caplog.at_level(logging.WARNING, "paceline"):
        for step in range(3 * LONG):
            task.watch({"head": 3.0, "discriminator": 0.01 if step >= LONG // 2 else 0.01 + (step == 5)})
    assert len(caplog.records) == 1
    assert "--discriminator-lr" in caplog.text


def test_equilibrium_ends_training(tiny_model_dir: Path, tiny_data: Path) -> None:
    """Half right after having been better; not knowing anything yet is no equilibrium."""
    task = game(tiny_model_dir, tiny_data, TrainConfig(), patience=2)
    course = [0.5, 0.5, 0.5, 0.7, 0.55, 0.51, 0.55, 0.51, 0.49]
    ended = [task.ends({"discriminator_accuracy": accuracy}) for accuracy in course]
    assert ended == [False] * 8 + [True]
    restored = game(tiny_model_dir, tiny_data, TrainConfig(), patience=2)
    assert not restored.ends({})
    restored.module.load_state_dict(task.module.state_dict())
    assert restored.ends({})
    never = game(tiny_model_dir, tiny_data, TrainConfig())
    assert not any(never.ends({"discriminator_accuracy": accuracy}) for accuracy in course)


@pytest.mark.parametrize(
    "wrong", [{"weight": -0.1}, {"form": "x"}, {"layers": 0}, {"lr": 0.0}, {"patience": -1}], ids=str
)
def test_wrong_options(wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        AdversarialOptions(**{"weight": 0.1, **wrong})  # type: ignore[arg-type]


def test_checkpoints_know_what_was_watched(
    tiny_model_dir: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.training.heads.adversarial.COLLAPSED", 1e9)
    config = TrainConfig(steps=4, tokens=300, report=2, held_back=4)
    play(game(tiny_model_dir, tiny_data, config), tiny_data, config, tmp_path)
    last = sorted(tmp_path.glob("checkpoint-*"))[-1]
    path = last if last.is_file() else next(last.glob("*.safetensors"))
    [low] = [int(value) for name, value in load_file(path).items() if name.endswith("low")]
    assert low == 4
