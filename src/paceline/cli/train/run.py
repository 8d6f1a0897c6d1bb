"""What the commands that train a head share: options, the run, and what it tells."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typer import Option

from paceline.cli.console import print_json
from paceline.cli.options import given_path
from paceline.errors import require

if TYPE_CHECKING:
    from paceline.training.heads.prepare import PreparedTraining, TrainingPlan
    from paceline.training.trainer import Report, TrainConfig


def training_option(*names: str, help: str, **more: Any) -> Any:
    return Option(*names, help=help, rich_help_panel="Training", **more)


@dataclass(frozen=True)
class Training:
    """On what, how long, where."""

    data: Annotated[
        list[Path],
        training_option(
            "--data",
            parser=given_path,
            metavar="FOLDER",
            help="Folder that 'paceline train data' wrote; may be repeated.",
        ),
    ]
    model: Annotated[str, training_option("--model", "-m", help="Named model, hub id, folder or GGUF file.")] = (
        "smollm2-135m"
    )
    out: Annotated[
        Path | None,
        training_option(
            "--out",
            "-o",
            parser=given_path,
            metavar="FOLDER",
            help="Folder of the head; default in the cache, where its drafter finds it.",
        ),
    ] = None
    objective: Annotated[
        Literal["text", "argmax", "distil", "whole"],
        training_option(
            "--objective",
            help="Learn the text, the model's likeliest token, its probabilities of the likeliest few, or of all "
            "(medusa, eagle, eagle3, dflash).",
        ),
    ] = "distil"
    epochs: Annotated[int, training_option("--epochs", help="Passes over the data.")] = 4
    steps: Annotated[int | None, training_option("--steps", help="End after so many, if the epochs have more.")] = None
    lr: Annotated[float, training_option("--lr", help="Highest learning rate.")] = 1e-3
    warmup: Annotated[float, training_option("--warmup", help="Share of the steps.")] = 0.05
    tokens: Annotated[int, training_option("--tokens", help="Tokens a pass.")] = 1024
    accumulate: Annotated[int, training_option("--accumulate", help="Passes a step, over all processes.")] = 1
    weight_decay: Annotated[float, training_option("--weight-decay", help="Of matrices.")] = 0.01
    clip: Annotated[float, training_option("--clip", help="Largest norm of the gradient.")] = 1.0
    max_length: Annotated[int, training_option("--max-length", help="Longer samples are cut there.")] = 1024
    held_back: Annotated[int, training_option("--held-back", help="Samples to measure on, at most a tenth of all.")] = (
        64
    )
    report: Annotated[int, training_option("--report", help="Steps between measurements, and between checkpoints.")] = (
        250
    )
    keep: Annotated[int, training_option("--keep", help="Latest checkpoints that stay.")] = 2
    store: Annotated[
        bool | None,
        training_option("--store/--no-store", help="Run the frozen layers once, into files; default on CPU."),
    ] = None
    store_limit: Annotated[float, training_option("--store-limit", help="Most that these files may take, in GB.")] = (
        32.0
    )
    seed: Annotated[
        int, training_option("--seed", min=0, max=2**63 - 1, help="Of the order of the data, and of random starts.")
    ] = 0
    device: Annotated[
        Literal["cpu", "cuda"] | None, training_option("--device", help="Default: a GPU where there is one.")
    ] = None
    tier: Annotated[str | None, training_option("--tier", help="Of the frozen layers.")] = None
    precision: Annotated[
        Literal["auto", "float32", "bfloat16"],
        training_option("--precision", help="Of products; auto: bfloat16 where the machine multiplies it faster."),
    ] = "auto"
    resume: Annotated[bool, training_option("--resume", help="Go on with a training that was stopped.")] = False
    as_json: Annotated[bool, training_option("--json", help="Print one JSON object.")] = False

    def task(self, vocab: int, stored: bool) -> dict[str, Any]:
        """Fields of `TaskOptions`."""
        return {
            "vocab": vocab or None,
            "objective": self.objective,
            "max_length": self.max_length,
            "stored": stored,
            "store_limit": self.store_limit,
        }

    def config(self) -> TrainConfig:
        """Raises OptionError for what is out of range."""
        from paceline.training.trainer import TrainConfig

        return TrainConfig(**{field.name: getattr(self, field.name) for field in fields(TrainConfig)})


def run(options: Training, prepare: Callable[[TrainingPlan, bool], PreparedTraining]) -> None:
    """Train, telling on standard error how it goes, and print the last measurement.

    Args:
        prepare: makes the task, given the plan of its training and whether to store what the frozen layers give.
    """
    config = options.config()
    gpu = options.device != "cpu" and _gpu()
    require(gpu or options.device != "cuda", "there is no CUDA device here")
    from accelerate import Accelerator

    from paceline.training.checkpoints import Checkpoints, alone
    from paceline.training.heads.prepare import TrainingPlan
    from paceline.training.trainer import Trainer

    held = ExitStack()

    def begin(home: Path) -> None:
        if accelerator.is_main_process:
            held.enter_context(alone(options.out or home))
        if not options.resume:
            Checkpoints(options.out or home, {}, options.keep).check_new()

    half = _fast_bfloat16(gpu) if options.precision == "auto" else options.precision == "bfloat16"
    accelerator = Accelerator(cpu=not gpu)
    config.check_processes(accelerator.num_processes)  # before the frozen layers run, which can take long
    with held, _bar(accelerator.is_main_process) as bar:
        frozen = bar.add_task("frozen layers: tokens", total=None)
        stored = not gpu if options.store is None else options.store
        plan = TrainingPlan(
            config,
            accelerator.device,
            options.tier,
            begin,
            lambda done, of: bar.update(frozen, completed=done, total=of),
            half,
        )
        made = prepare(plan, stored)
        bar.remove_task(frozen)
        out, resume = options.out or made.home, options.resume
        trainer = Trainer(
            made.task, made.data, config, out, accelerator, settings=made.settings, resume=resume, half=half
        )
        bar.console.print(_about(made, trainer.samples, accelerator.num_processes), soft_wrap=True, highlight=False)
        steps = bar.add_task("", total=len(trainer.steps), completed=trainer.step)

        def show(now: Report) -> None:
            speed = "" if now.loss is None else f"loss {now.loss:.3f}, {now.tokens_per_s:,.0f} tokens/s"
            bar.update(steps, completed=now.step, description=speed)
            if now.measured:
                line = "; ".join(filter(None, [f"step {now.step} of {now.of}", _figures(now.measured), speed]))
                bar.console.print(line, soft_wrap=True, highlight=False)

        measured = trainer.run(show)
    accelerator.end_training()  # left open, the process group may abort Python's exit
    if not accelerator.is_main_process:
        return
    if options.as_json:
        print_json({"out": str(out), "steps": trainer.step, **measured})
    else:
        print(_figures(measured))
        print(f"stored in {out}", file=sys.stderr)


def _fast_bfloat16(gpu: bool) -> bool:
    import torch

    return gpu or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _about(made: PreparedTraining, samples: tuple[int, int], processes: int) -> str:
    counts = made.task.head.parameter_counts()
    parts = ", ".join(f"{part} {count:,}" for part, count in counts.items() if part != "total")
    text = f"parameters: {made.total:,} of the model; {made.loaded:,} loaded; {counts['total']:,} trained ({parts})"
    text += f"\nsamples: {samples[0]:,} to learn from, {samples[1]:,} held back"
    return text if processes == 1 else f"{text}; {processes} processes"


def _figures(measured: dict[str, float]) -> str:
    """Simulated acceptance: a draft's first token, the first two, ..."""
    chain = " ".join(f"{value:.3f}" for name, value in measured.items() if name.startswith("accepted_"))
    rest = ", ".join(f"{n.replace('_', ' ')} {v:.3f}" for n, v in measured.items() if not n.startswith("accepted_"))
    return f"accepted {chain}, {rest}"


def _bar(shown: bool) -> Progress:
    """A bar on a terminal, and lines of text wherever standard error goes; nothing unless `shown`."""
    console = Console(stderr=True, quiet=not shown)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TextColumn("left"))
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=not (shown and console.is_terminal))
