"""The trainer: one loop for every drafter that learns from text, on one process or several."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils import broadcast
from torch import Tensor, nn

from paceline.errors import TrainingError, require
from paceline.files import whole
from paceline.training.checkpoints import Checkpoints
from paceline.training.curves import METRICS, write_curves
from paceline.training.task import LARGEST

if TYPE_CHECKING:
    from accelerate import Accelerator

    from paceline.training.data.dataset import Dataset
    from paceline.training.task import Player, Task

log = logging.getLogger("paceline")


@dataclass(frozen=True)
class TrainConfig:
    """How to train.

    Args:
        epochs: passes over the data; EESD takes 4 to 6.
        steps: end after so many, if the epochs have more.
        lr: highest learning rate, reached after the warm-up, falling to 0 by a cosine.
        warmup: share of the steps.
        tokens: a pass at a time, padding included.
        accumulate: passes a step, those of all processes together: at least one for each.
        weight_decay: of matrices; norms have none.
        clip: largest norm of the gradient.
        held_back: samples to measure on.
        report: steps between measurements, and between checkpoints.
        keep: latest checkpoints that stay.
        seed: of the order of the data.
    """

    epochs: int = 4
    steps: int | None = None
    lr: float = 1e-3
    warmup: float = 0.05
    tokens: int = 1024
    accumulate: int = 1
    weight_decay: float = 0.01
    clip: float = 1.0
    held_back: int = 64
    report: int = 250
    keep: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "tokens", "accumulate", "held_back", "report", "keep"):
            require(getattr(self, name) >= 1, f"{name.replace('_', '-')} must be >= 1, not {getattr(self, name)}")
        require(self.steps is None or self.steps >= 1, f"steps must be >= 1, not {self.steps}")
        require(0 < self.lr <= LARGEST, f"lr must be > 0 and at most {LARGEST:g}, not {self.lr}")
        require(0 <= self.warmup < 1, f"warmup must lie in [0, 1), not {self.warmup}")
        decay = self.weight_decay
        require(0 <= decay <= LARGEST, f"weight-decay must lie in 0 .. {LARGEST:g}, not {decay}")
        require(self.clip > 0, f"clip must be > 0, not {self.clip}")

    def check_processes(self, count: int) -> None:
        """Raises OptionError where some of so many processes would have nothing to do."""
        passes = self.accumulate
        require(passes >= count, f"{count} processes share {passes} passes a step: give --accumulate {count} or more")


class Report(NamedTuple):
    """Where training stands: at its beginning, then after every step. `measured` comes every `report` steps, with a
    checkpoint.
    """

    step: int
    of: int
    loss: float | None  # the drafter's, mean over the step's labels
    tokens_per_s: float  # of this run, measurements included
    measured: dict[str, float] | None


class Trainer:
    """Trains a task on a dataset into the folder `out`.

    The result depends on the configuration and the data alone: not on the number of processes (up to rounding), nor on
    whether training was stopped and resumed on the way.

    Args:
        settings: what else the result depends on.
        resume: go on from the last checkpoint in `out`.
        half: products in bfloat16; weights, sums and losses are in float32 all the same.

    Raises:
        OptionError: `out` holds another training, or one that was not to be resumed; or processes have nothing to do.
    """

    def __init__(
        self,
        task: Task,
        data: Dataset,
        config: TrainConfig,
        out: Path,
        accelerator: Accelerator,
        *,
        settings: dict[str, Any] | None = None,
        resume: bool = False,
        half: bool = False,
    ) -> None:
        config.check_processes(accelerator.num_processes)
        self.task, self.data, self.config, self.out, self.accelerator = task, data, config, out, accelerator
        self.half = half
        self.learning = {  # what each player may change
            player.name: [weight for weight in player.module.parameters() if weight.requires_grad]
            for player in task.players
        }
        self.optimizer = torch.optim.AdamW(self._groups(), betas=(0.9, 0.95))
        training, held_back = data.split(config.held_back)
        self.samples = len(training), len(held_back)  # to learn from, and to measure on
        self.held_back = data.batches(held_back, config.tokens, seed=None)
        self.steps = self._plan(training)
        self.checkpoints = Checkpoints(out, {**asdict(config), **(settings or {}), "half": half}, config.keep)
        self.step = self.checkpoints.restore(task.module, self.optimizer) if resume else 0
        if not resume:
            self.checkpoints.check_new()
        elif not self.step and accelerator.is_main_process:
            log.warning("There is nothing to go on with in %s: the training begins.", out)
        for weight in chain(*self.learning.values()):  # processes may have rounded a start of their own
            weight.data = broadcast(weight.data)
        self.log = Log(out, self.step) if accelerator.is_main_process else None

    def _groups(self) -> list[dict[str, Any]]:
        """Of the optimizer: `scale` is the player's share of the learning rate."""
        groups = []
        for player in self.task.players:
            about = {"scale": player.lr, "lr": player.lr * self.config.lr}
            decayed, others = list[Tensor](), list[Tensor]()
            for name, weight in player.module.named_parameters():
                if weight.requires_grad:
                    matrix = weight.dim() > 1 and not name.endswith("bias")  # Medusa has the biases of all heads in one
                    (decayed if matrix else others).append(weight)
            groups += [
                {"params": decayed, "weight_decay": self.config.weight_decay, **about},
                {"params": others, "weight_decay": 0.0, **about},
            ]
        return groups

    def _plan(self, training: Sequence[int]) -> list[list[list[int]]]:
        """The samples of every pass of every step."""
        steps: list[list[list[int]]] = []
        for epoch in range(self.config.epochs):
            if self.config.steps is not None and len(steps) >= self.config.steps:
                break  # however many epochs there are
            passes = self.data.batches(training, self.config.tokens, seed=(self.config.seed, epoch))
            steps += [passes[at : at + self.config.accumulate] for at in range(0, len(passes), self.config.accumulate)]
        return steps[: self.config.steps]

    def run(self, report: Callable[[Report], None] = lambda _: None) -> dict[str, float]:
        """Train to the end, or until the task says so; returns the last measurement.

        Raises:
            TrainingError: the loss, its gradient or a weight is no number.
            DiskFull: a checkpoint could not be written.
        """
        started, tokens, of = time.perf_counter(), 0, len(self.steps)
        measured = self.measure()
        if self.step == 0:
            self._note({"step": 0, **measured})
        report(Report(self.step, of, None, 0.0, measured))
        ends = self.task.ends({})
        while self.step < of and not ends:
            losses, lr = self._step(self.steps[self.step])
            tokens += sum(int(self.data.lengths[i]) for samples in self.steps[self.step] for i in samples)
            self.step += 1
            self.task.watch(losses)  # before a checkpoint, which has what it has seen
            due = self.step % self.config.report == 0 or self.step == of
            if due:
                measured = self.measure()
                self._check(measured)
                ends = self.task.ends(measured)
            loss, *others = losses.items()
            logged = {"loss": loss[1], **{f"{name}_loss": value for name, value in others}, "lr": lr}
            self._note({"step": self.step, **logged, **(measured if due else {})})
            if due:
                self._save(
                    measured, ends or self.step == of
                )  # after the note: no step before a checkpoint is run again
            if due and self.log:
                write_curves(self.out)
            speed = tokens / (time.perf_counter() - started)
            report(Report(self.step, of, loss[1], speed, measured if due else None))
        return measured

    def measure(self) -> dict[str, float]:
        """On the samples held back, each process on its part of them."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        with torch.inference_mode(), self._precision():
            total = torch.zeros(self.task.counts, device=self.accelerator.device)
            for samples in self.held_back[rank::world]:
                total += self.task.count(self.data.batch(samples).to(self.accelerator.device))
        return self.task.measure(self._summed(total).cpu())

    def _step(self, passes: list[list[int]]) -> tuple[dict[str, float], float]:
        """Every player's turn; their losses, by name, and the learning rate."""
        lr = self._lr(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["scale"]
        return {player.name: self._turn(player, passes) for player in self.task.players}, lr

    def _turn(self, player: Player, passes: list[list[int]]) -> float:
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        labels = sum(int(self.data.learnt[index]) for samples in passes for index in samples)
        device = self.accelerator.device
        total = torch.zeros((), device=device)
        for name, weights in self.learning.items():
            for weight in weights:  # the optimizer leaves alone what has no gradient
                weight.requires_grad_(name == player.name)
                weight.grad = torch.zeros_like(weight) if name == player.name else None
        for samples in passes[rank::world]:
            batch = self.data.batch(samples, self.step).to(device)
            with self._precision():
                loss = player.loss(batch) / labels
            loss.backward()
            total += loss.detach()
        weights = self.learning[player.name]
        total = self._share_gradients(total, weights)
        norm = nn.utils.clip_grad_norm_(weights, self.config.clip)
        if not (torch.isfinite(total) and torch.isfinite(norm)):
            raise self._failed(f"the loss is {float(total)}, its gradient's norm {float(norm)} at step {self.step + 1}")
        self.optimizer.step()
        return float(total)

    def _check(self, measured: dict[str, float]) -> None:
        """Raises TrainingError before anything is written that is no good."""
        for name, value in measured.items():
            if not math.isfinite(value):
                raise self._failed(f"{name.replace('_', ' ')} is {value} after step {self.step}")
        if not all(bool(torch.isfinite(weight).all()) for weight in chain(*self.learning.values())):
            raise self._failed(f"a weight is not a number, or infinite, after step {self.step}")

    def _failed(self, what: str) -> TrainingError:
        good = self.checkpoints.latest()
        known = f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
        return TrainingError(f"{what}: {known}; a lower --lr may help")

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=self.half)

    def _lr(self, step: int) -> float:
        """Linear warm-up, then a cosine down to 0."""
        warm = max(1, round(self.config.warmup * len(self.steps)))
        if step < warm:
            return self.config.lr * (step + 1) / warm
        return self.config.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, len(self.steps) - warm)))

    def _share_gradients(self, loss: Tensor, weights: list[nn.Parameter]) -> Tensor:
        """Sum gradients, and the loss, over the processes: each has those of its part of the step's labels."""
        if self.accelerator.num_processes == 1:
            return loss
        gradients = [weight.grad if weight.grad is not None else torch.zeros_like(weight) for weight in weights]
        flat = self._summed(torch.cat([loss.reshape(1).float(), *(g.reshape(-1).float() for g in gradients)]))
        parts = flat[1:].split([weight.numel() for weight in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.grad = part.view_as(weight).to(weight.dtype)
        return flat[0]

    def _summed(self, tensor: Tensor) -> Tensor:
        return self.accelerator.reduce(tensor, "sum") if self.accelerator.num_processes > 1 else tensor

    def _save(self, measured: dict[str, float], ended: bool) -> None:
        if self.accelerator.is_main_process:
            about = {"step": self.step, "steps": len(self.steps), "ended": ended, "measured": measured}
            self.task.save(self.out, self.checkpoints.settings | about)
            # Last: from the last checkpoint on there is nothing to resume, nor to write again.
            self.checkpoints.save(self.step, self.task.module, self.optimizer)
        self.accelerator.wait_for_everyone()

    def _note(self, facts: dict[str, float]) -> None:
        if self.log:
            self.log.write(facts)


class Log:
    """`metrics.jsonl`, a line a step, and the same for TensorBoard where that is installed."""

    def __init__(self, out: Path, step: int) -> None:
        self.path, self.board = out / METRICS, None
        out.mkdir(parents=True, exist_ok=True)
        before = [line for line in _complete(self.path) if _step(line) <= step] if step else []
        with whole(self.path, "go on with --resume") as partial:
            partial.write_text("".join(before), encoding="utf-8")
        with suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)

    def write(self, facts: dict[str, float]) -> None:
        facts = {name: value for name, value in facts.items() if math.isfinite(value)}  # JSON has no other numbers
        with self.path.open("a") as file:
            file.write(json.dumps(facts) + "\n")
        if self.board:
            for name, value in facts.items():
                self.board.add_scalar(name, value, int(facts["step"]))


def _complete(path: Path) -> list[str]:
    """The lines of a file; a kill may have cut the last one short."""
    lines = path.read_text("utf-8", errors="replace").splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n")]


def _step(line: str) -> float:
    """Which step a line is of; beyond all where it is damaged, so that it is left out."""
    try:
        facts = json.loads(line)
        return float(facts["step"]) if all(math.isfinite(value) for value in facts.values()) else math.inf
    except (ValueError, TypeError, KeyError, AttributeError):
        return math.inf
