"""What DFlash heads learn: blocks that begin somewhere in a text, each as it is drafted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from drafters.test_dflash import logits
from helpers import one_thread  # noqa: F401
from paceline.errors import OptionError
from paceline.targets.reference import as_target
from paceline.training.data.dataset import IGNORE
from paceline.training.heads.dflash import DFlashOptions, DFlashTask, prepare_dflash
from paceline.training.heads.prepare import PreparedTraining, TrainingPlan
from paceline.training.trainer import TrainConfig

BLOCK = 4


def prepared(model: Path, data: Path, **options: Any) -> PreparedTraining:
    config = DFlashOptions(**{"block": BLOCK, "vocab": None, "stored": False, "layers": 2, **options})
    made = prepare_dflash(str(model), [data], config, TrainingPlan(TrainConfig(), torch.device("cpu")))
    with torch.no_grad():
        for index, weight in enumerate(made.task.head.parameters()):  # all parts of it in use
            weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(index))
    return made


@pytest.mark.parametrize("objective", ["distil", "whole"])
@torch.no_grad()
def test_a_block_is_learnt_as_it_is_drafted(objective: str, tiny_model_dir: Path, tiny_data: Path) -> None:
    made = prepared(tiny_model_dir, tiny_data, objective=objective, every=1)
    task: DFlashTask = made.task
    batch, target = made.data.batch([3, 7]), as_target(AutoModelForCausalLM.from_pretrained(tiny_model_dir))
    drafts, features = task.drafts(batch), task.frozen(batch)[..., -target.config.hidden_size :]
    truth, row = drafts.truth.each(drafts.truth.features), 0
    for text, tokens in enumerate(batch.rows):
        ids = batch.ids[text].tolist()
        told = [
            at + 1 < len(tokens) if objective == "whole" else batch.labels[text, at] != IGNORE
            for at in range(len(tokens))
        ]
        for at in (at for at in range(1, len(tokens)) if told[at]):
            said = logits(target, task.head, ids[: at + 1], BLOCK)
            for place in (place for place in range(BLOCK - 1) if at + place < len(tokens) and told[at + place]):
                torch.testing.assert_close(drafts.logits[row], said[place], rtol=1e-3, atol=1e-3)
                torch.testing.assert_close(truth[row], features[text, at + place], rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(drafts.hidden[row], features[text, at - 1], rtol=1e-4, atol=1e-4)
                assert float(drafts.weights[row] / drafts.weights.max()) == pytest.approx(0.8**place)
                row += 1
    assert row == len(drafts.logits)
    assert float(drafts.weights.sum()) <= int((batch.labels != IGNORE).sum()) + 1e-3


@torch.no_grad()
def test_it_is_measured_as_it_drafts(tiny_model_dir: Path, tiny_data: Path) -> None:
    """Greedily, from every second position of the text that the model wrote."""
    made = prepared(tiny_model_dir, tiny_data, every=2)
    task, target = made.task, as_target(AutoModelForCausalLM.from_pretrained(tiny_model_dir))
    [index] = [i for i in range(len(made.data)) if made.data.generated[i]][:1]
    batch = made.data.batch([index])
    ids, hits, starts = batch.ids[0].tolist(), [0] * (BLOCK - 1), [0] * (BLOCK - 1)
    for at in [at for at in range(1, len(ids)) if batch.labels[0, at] != IGNORE][::2]:
        drafted = logits(target, task.head, ids[: at + 1], BLOCK).argmax(-1).tolist()
        for n in range(1, BLOCK):
            if at + n < len(ids):
                starts[n - 1] += 1
                hits[n - 1] += drafted[:n] == ids[at + 1 : at + 1 + n]
    counts = task.count(batch)
    assert counts[: BLOCK - 1].tolist() == hits
    assert counts[5 : 5 + BLOCK - 1].tolist() == starts
    assert set(task.measure(counts)) >= {"accepted_1", "accepted_2", "accepted_3", "held_back_loss"}
    assert "accepted_4" not in task.measure(counts)


def test_blocks_begin_elsewhere_at_every_step(tiny_model_dir: Path, tiny_data: Path) -> None:
    """And at the same places after a resumption; there is one for so many tokens."""
    made = prepared(tiny_model_dir, tiny_data, every=3)
    first, again, later = (made.task.drafts(made.data.batch([3], step)) for step in (0, 0, 7))
    assert torch.equal(first.logits, again.logits)
    assert first.logits.shape != later.logits.shape or (first.logits != later.logits).any()
    begins = int((first.weights == first.weights.max()).sum())
    may = int((made.data.batch([3]).labels[:, 1:] != IGNORE).sum())
    assert begins == -(-may // 3)


@pytest.mark.parametrize("other", [{"taps": (1, 2)}, {"mask": 5}])
def test_a_head_that_means_something_else_does_not_go_on(
    other: dict[str, Any], tiny_model_dir: Path, tiny_data: Path, tmp_path: Path
) -> None:
    common = {"taps": (1, 3)}
    prepared(tiny_model_dir, tiny_data, **common).task.save(tmp_path, {})
    prepared(tiny_model_dir, tiny_data, **common, init=str(tmp_path))
    with pytest.raises(OptionError, match="the head to go on from has other --taps"):
        prepared(tiny_model_dir, tiny_data, **(common | other), init=str(tmp_path))


@pytest.mark.parametrize("wrong", [{"every": 0}, {"fading": 0.0}, {"fading": 1.5}, {"layers": 0}])
def test_wrong_options(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        DFlashOptions(**wrong)


@pytest.mark.parametrize("wrong", [{"block": 1}, {"mask": 257}, {"inner": 0}, {"taps": (9,)}])
def test_what_does_not_fit_the_model(wrong: dict[str, Any], tiny_model_dir: Path, tiny_data: Path) -> None:
    with pytest.raises(OptionError):
        prepared(tiny_model_dir, tiny_data, **wrong)
