"""Training an exit head: it learns, its start, what is loaded, and that stops, processes and stores change nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from helpers import one_thread  # noqa: F401
from paceline.drafters.early_exit.head import ExitHead
from paceline.errors import CheckpointError, DataError, OptionError, TrainingError
from paceline.targets.reference import as_target
from paceline.targets.span import Span
from paceline.training.checkpoints import Checkpoints
from paceline.training.data.dataset import Dataset, frequent_tokens
from paceline.training.heads import frozen_layers as frozen
from paceline.training.heads.early_exit import ExitConfig, prepare_early_exit
from paceline.training.heads.prepare import PreparedTraining, TrainingPlan
from paceline.training.trainer import Report, TrainConfig, Trainer

CPU = torch.device("cpu")
TRAIN = {"epochs": 2, "tokens": 200, "accumulate": 2, "report": 5, "held_back": 4, "lr": 3e-3}


def assembled(model: Path, data: Path, **options: Any) -> PreparedTraining:
    return prepare_early_exit(
        str(model),
        [data],
        ExitConfig(**{"layers": 1, "vocab": 100, **options}),
        TrainingPlan(TrainConfig(**TRAIN), CPU),
    )


def trainer(made: PreparedTraining, out: Path, resume: bool = False, **options: Any) -> Trainer:
    config = TrainConfig(**{**TRAIN, **options})
    return Trainer(made.task, made.data, config, out, Accelerator(cpu=True), settings=made.settings, resume=resume)


def curve(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_it_learns_and_can_be_used(tiny_model_dir: Path, tiny_data: Path, tmp_path: Path) -> None:
    made = assembled(tiny_model_dir, tiny_data, vocab=None)
    trained = trainer(made, tmp_path / "out", epochs=6)
    seen: list[Report] = []
    measured = trained.run(seen.append)
    lines = curve(tmp_path / "out")
    assert [line["step"] for line in lines] == list(range(len(trained.steps) + 1))
    assert measured["held_back_loss"] < lines[0]["held_back_loss"]
    assert measured["argmax"] > max(0.3, lines[0]["argmax"])
    assert 1 >= measured["accepted_1"] >= measured["accepted_2"] >= measured["accepted_5"] >= 0
    assert seen[-1].step == seen[-1].of == len(trained.steps)
    target = as_target(AutoModelForCausalLM.from_pretrained(tiny_model_dir))
    head = ExitHead.load(tmp_path / "out", target)
    assert head.config.trained["objective"] == "distil"
    assert head.config.trained["measured"] == measured
    torch.testing.assert_close(head.state_dict(), made.task.head.state_dict())


def test_measured_acceptance_is_that_of_drafts(tiny_model_dir: Path, tiny_data: Path) -> None:
    """Draft greedily from every position of a held-back text, token by token, and compare."""
    made = assembled(tiny_model_dir, tiny_data, vocab=None, stored=False)
    target = as_target(AutoModelForCausalLM.from_pretrained(tiny_model_dir))
    [index] = [i for i in range(len(made.data)) if made.data.generated[i]][:1]
    batch = made.data.batch([index])
    ids, first = batch.ids[0].tolist(), int((batch.labels[0] != -100).nonzero()[0]) + 1

    @torch.inference_mode()
    def draft(context: list[int]) -> int:
        span = Span(torch.tensor([context]), np.zeros(1, dtype=np.int64))
        hidden = target.layers(target.embed(span), span, target.new_cache(1, len(context)), 0, 1)
        return int(made.task.head(hidden)[0, -1].argmax())

    hits = starts = 0
    for at in range(first, len(ids) - 1):
        context = ids[:at]
        context.append(draft(context))
        context.append(draft(context))
        hits, starts = hits + (context[at:] == ids[at : at + 2]), starts + 1
    with torch.inference_mode():
        counts = made.task.count(batch)
    assert (counts[1], counts[6]) == (hits, starts)


@pytest.mark.parametrize("options", [{}, {"rank": 8}, {"exit_layers": 0}])
def test_start(tiny_model_dir: Path, tiny_data: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """Fitted to the text, it agrees with the target more often than a copy of the last layers does."""
    fitted = trainer(assembled(tiny_model_dir, tiny_data, **options), tmp_path / "a")
    last = trainer(assembled(tiny_model_dir, tiny_data, start="last", **options), tmp_path / "b")
    assert fitted.measure()["held_back_loss"] < last.measure()["held_back_loss"]


def test_the_last_layers_are_the_paper_s_start(tiny_model_dir: Path, tiny_data: Path) -> None:
    head = assembled(tiny_model_dir, tiny_data, start="last", vocab=None).task.head
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    torch.testing.assert_close(head.decoder.layers[0].state_dict(), model.model.layers[-1].state_dict())
    torch.testing.assert_close(head.lm.get_output_embeddings().weight, model.lm_head.weight)


def test_what_is_loaded(tiny_model_dir: Path, tiny_data: Path) -> None:
    made = assembled(tiny_model_dir, tiny_data)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    layer, embedding = (sum(w.numel() for w in part.parameters()) for part in (model.model.layers[0], model.lm_head))
    assert made.total == embedding + 3 * layer + 32
    assert made.loaded == (embedding + layer + 32) + (layer + 32 + 100 * 32)


@pytest.mark.parametrize("stored", [True, False])
def test_hidden_states(tiny_model_dir: Path, tiny_data: Path, stored: bool) -> None:
    made = assembled(tiny_model_dir, tiny_data, layers=2, stored=stored)
    model, batch = AutoModelForCausalLM.from_pretrained(tiny_model_dir), made.data.batch([5, 2, 9])
    with torch.no_grad():
        want = model(batch.ids, output_hidden_states=True).hidden_states[2]
    got = made.task.frozen(batch)
    for row, tokens in enumerate(batch.rows):
        torch.testing.assert_close(got[row, : len(tokens)], want[row, : len(tokens)], rtol=2e-3, atol=2e-3)


def test_resumed_is_uninterrupted(tiny_model_dir: Path, tiny_data: Path, tmp_path: Path) -> None:
    whole = trainer(assembled(tiny_model_dir, tiny_data), tmp_path / "whole")
    whole.run()

    class Killed(BaseException):
        pass

    def kill(now: Report) -> None:
        if now.step == 8:
            raise Killed

    with pytest.raises(Killed):
        trainer(assembled(tiny_model_dir, tiny_data), tmp_path / "cut").run(kill)
    assert curve(tmp_path / "cut")[-1]["step"] == 8
    with pytest.raises(OptionError, match="--resume"):
        trainer(assembled(tiny_model_dir, tiny_data), tmp_path / "cut")
    made = assembled(tiny_model_dir, tiny_data)
    made.data.hashes[1] = "of other contents"
    with pytest.raises(OptionError, match="another data"):
        trainer(made._replace(settings={**made.settings, "data": made.data.digest}), tmp_path / "cut", resume=True)
    with pytest.raises(OptionError, match="another lr"):
        trainer(assembled(tiny_model_dir, tiny_data), tmp_path / "cut", resume=True, lr=1.0)
    again = trainer(assembled(tiny_model_dir, tiny_data), tmp_path / "cut", resume=True)
    assert again.step == 5
    again.run()
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    ours, theirs = (ExitHead.load(tmp_path / name).state_dict() for name in ("cut", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert len(list((tmp_path / "cut").glob("checkpoint-*"))) == 2


def test_killed_after_a_checkpoint_its_step_is_noted(
    tiny_model_dir: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not run again."""
    save = Checkpoints.save

    def saved(self: Checkpoints, step: int, *more: Any) -> None:
        save(self, step, *more)
        if step:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "save", saved)
    with pytest.raises(KeyboardInterrupt):
        trainer(assembled(tiny_model_dir, tiny_data), tmp_path).run()
    monkeypatch.undo()
    again = trainer(assembled(tiny_model_dir, tiny_data), tmp_path, resume=True)
    again.run()
    assert [line["step"] for line in curve(tmp_path)] == list(range(len(again.steps) + 1))


def test_killed_before_the_last_checkpoint(
    tiny_model_dir: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is nothing left to resume the head is there, whole."""
    made = trainer(assembled(tiny_model_dir, tiny_data), tmp_path, steps=5)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ExitHead, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        made.run()
    monkeypatch.undo()
    assert not list(tmp_path.glob("checkpoint-*"))
    trainer(assembled(tiny_model_dir, tiny_data), tmp_path, resume=True, steps=5).run()
    trained = ExitHead.load(tmp_path).config.trained
    assert (trained["step"], trained["ended"]) == (5, True)


def test_damaged_checkpoint(tiny_model_dir: Path, tiny_data: Path, tmp_path: Path) -> None:
    made = assembled(tiny_model_dir, tiny_data)
    trainer(made, tmp_path, resume=True).run()  # nothing to resume: it begins
    latest = sorted(tmp_path.glob("checkpoint-*"))[-1]
    part = latest.read_bytes()[:-50]
    latest.unlink()
    latest.write_bytes(part)
    with pytest.raises(CheckpointError, match="delete it"):
        trainer(made, tmp_path, resume=True)


def test_no_number(tiny_model_dir: Path, tiny_data: Path, tmp_path: Path) -> None:
    made = assembled(tiny_model_dir, tiny_data)
    broken = trainer(made, tmp_path)

    def spoil(now: Report) -> None:
        if now.step == 6:
            made.task.head.lm.get_output_embeddings().weight.data[0] = torch.nan

    with pytest.raises(TrainingError, match=r"the loss is nan.* at step 7.*checkpoint-0000005\.safetensors"):
        broken.run(spoil)
    assert len(list(tmp_path.glob("checkpoint-*"))) == 1


def test_weights_that_are_no_numbers(tiny_model_dir: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Are not saved, nor noted: a loss comes before the step that spoils them."""
    made = assembled(tiny_model_dir, tiny_data, vocab=None)
    matrix = made.task.head.lm.get_output_embeddings().weight

    def spoiled(out: Path, at: int, **options: Any) -> Trainer:
        broken = trainer(made, out, **options)
        step = broken.optimizer.step

        def spoil() -> None:
            step()
            if broken.step == at - 1:
                matrix.data[0] = torch.nan

        broken.optimizer.step = spoil  # type: ignore[method-assign]
        return broken

    broken = spoiled(tmp_path, 10)
    with pytest.raises(TrainingError, match=r"after step 10: the last good checkpoint is .*checkpoint-0000005\.safe"):
        broken.run()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-0000005.safetensors"]
    assert all(weight.isfinite().all() for weight in load_file(next(tmp_path.glob("early-exit*.safetensors"))).values())
    matrix.data[0] = 0.0
    fresh = spoiled(tmp_path / "fresh", 1, steps=1)
    with pytest.raises(TrainingError, match="there is no checkpoint yet"):
        fresh.run()
    assert sorted(path.name for path in (tmp_path / "fresh").iterdir()) == ["metrics.jsonl", "tensorboard"]
    text = (tmp_path / "fresh" / "metrics.jsonl").read_text()
    assert "NaN" not in text + (tmp_path / "metrics.jsonl").read_text()


def test_damaged_metrics(tiny_model_dir: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Lines that cannot be read are left out, and training goes on."""
    trainer(assembled(tiny_model_dir, tiny_data), tmp_path, steps=5).run()
    whole = curve(tmp_path)
    bad = b'{"step": 2\n\xff\xfe\n[]\n3\n{"loss": 1}\n{"step": "x"}\n{"step": 1, "loss": NaN}\n'
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(bad + path.read_bytes() + b'{"step"')
    again = trainer(assembled(tiny_model_dir, tiny_data), tmp_path, steps=5, resume=True)
    assert curve(tmp_path) == whole
    again.log.write({"step": 6, "loss": float("nan"), "lr": 0.1})
    assert curve(tmp_path) == [*whole, {"step": 6, "lr": 0.1}]


def test_data_without_probabilities(
    tiny_model_dir: Path, tiny_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Text can be learnt from them, and nothing else; nor from another model's without a word."""
    for path in tiny_data.glob("samples-*"):
        columns = load_file(path)
        save_file(columns | {n: columns[n][:, :0].contiguous() for n in ("top_ids", "top_logp")}, tmp_path / path.name)
    manifest = json.loads((tiny_data / "manifest.json").read_text())
    manifest["made"] |= {"top": 0, "model": "another"}
    for entry in manifest["shards"].values():
        del entry["sha256"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    for objective in ("distil", "argmax"):
        with pytest.raises(OptionError, match=f"no probabilities, which {objective} learns .*: give --objective text"):
            assembled(tiny_model_dir, tmp_path, objective=objective)
    assert not caplog.messages
    trainer(assembled(tiny_model_dir, tmp_path, objective="text"), tmp_path / "out", steps=1).run()
    [warning] = [message for message in caplog.messages if "written by" in message]
    assert warning.startswith("The data was written by another, and the head is for ")


def test_full_disk(tiny_model_dir: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.errors import DiskFull
    from paceline.training import checkpoints

    def full(*arguments: object) -> None:
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    run = trainer(assembled(tiny_model_dir, tiny_data), tmp_path)
    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(DiskFull, match="make room"):
        run.run()


def test_store_is_made_once_and_checked(tiny_model_dir: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = assembled(tiny_model_dir, tiny_data).task.frozen.paths[1]
    monkeypatch.setattr(frozen.FrozenLayers, "__call__", None)
    assembled(tiny_model_dir, tiny_data)
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[:-2])
    try:
        with pytest.raises(DataError, match="delete it"):
            assembled(tiny_model_dir, tiny_data)
    finally:
        path.write_bytes(whole)


def test_steps_bound_the_epochs(tiny_model_dir: Path, tiny_data: Path, tmp_path: Path) -> None:
    """However many there are: none is planned that does not come."""
    made = assembled(tiny_model_dir, tiny_data)
    assert len(trainer(made, tmp_path, steps=5, epochs=10**12).steps) == 5


def test_frequent_tokens() -> None:
    counts = torch.tensor([0, 5, 0, 7, 5, 1])
    assert frequent_tokens(counts, 3, (2,)) == [1, 2, 3]
    assert frequent_tokens(counts, 3, (2, 6)) == [1, 2, 3]  # a configuration may name what the model has no row for
    assert frequent_tokens(counts, 6, ()) is None
    assert frequent_tokens(counts, None, ()) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": 3},
        {"layers": 0},
        {"exit_layers": 9},
        {"vocab": 0},
        {"start": "x"},
        {"objective": "x"},
        {"objective": "whole"},
    ],
)
def test_wrong_options(tiny_model_dir: Path, tiny_data: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        assembled(tiny_model_dir, tiny_data, **wrong)


def test_layers_of_a_head(tiny_model_dir: Path, tiny_data: Path) -> None:
    with pytest.raises(OptionError, match=r"exit-layers must lie in 0 .. 5, not -1"):
        assembled(tiny_model_dir, tiny_data, exit_layers=-1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"lr": 0.0},
        {"lr": float("inf")},
        {"warmup": 1.0},
        {"clip": 0},
        {"weight_decay": -1},
        {"weight_decay": float("inf")},
    ],
)
def test_wrong_training(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        TrainConfig(**wrong)


def test_a_pass_for_every_process() -> None:
    TrainConfig(accumulate=2).check_processes(2)
    with pytest.raises(OptionError, match="--accumulate 2"):
        TrainConfig().check_processes(2)


def test_two_processes_give_the_curve_of_one(tiny_model_dir: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Over gloo."""
    command = ["-m", "paceline", "train", "early-exit", "--model", tiny_model_dir, "--data", tiny_data, "--json"]
    command += ["--layers", 1, "--vocab", 100, "--tokens", 200, "--accumulate", 3, "--epochs", 2, "--report", 5]
    command += ["--precision", "float32"]  # of bfloat16 the rounding is more than the tolerance
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    one = subprocess.Popen(list(map(str, [sys.executable, *command, "--out", tmp_path / "one", "--device", "cpu"])))
    words = [*launch, *command, "--out", tmp_path / "two", "--device", "cpu"]
    two = subprocess.run(list(map(str, [sys.executable, *words])), capture_output=True, text=True)
    assert two.returncode == 0, two.stderr
    assert "; 2 processes" in two.stderr  # not one after the other, nor one of one
    assert one.wait() == 0
    assert len(two.stdout.splitlines()) == 1  # one process speaks
    ours, theirs = curve(tmp_path / "one"), curve(tmp_path / "two")
    assert len(ours) == len(theirs) > 5
    for a, b in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-4)
    assert (
        Dataset(tiny_data).digest == json.loads((tmp_path / "two" / "early-exit.json").read_text())["trained"]["data"]
    )
