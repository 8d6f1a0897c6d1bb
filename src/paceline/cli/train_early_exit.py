"""`paceline train early-exit`: an exit head for a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typer import Option

from paceline.cli.console import print_json
from paceline.registry import require

if TYPE_CHECKING:
    from paceline.training.assemble import Assembled
    from paceline.training.trainer import Report


def early_exit(
    data: Annotated[list[Path], Option("--data", help="Folder that 'paceline train data' wrote; may be repeated.")],
    model: Annotated[str, Option("--model", "-m", help="Named model, hub id, folder or GGUF file.")] = "smollm2-135m",
    out: Annotated[
        Path | None, Option("--out", "-o", help="Folder of the head; default in the cache, where early-exit finds it.")
    ] = None,
    layers: Annotated[int, Option("--layers", "-N", help="The model's layers below the head.")] = 4,
    exit_layers: Annotated[int, Option("--exit-layers", help="Layers of the head.")] = 1,
    vocab: Annotated[int, Option("--vocab", help="Tokens it can draft, the most frequent ones; 0: all.")] = 8192,
    rank: Annotated[int | None, Option("--rank", help="Of a low-rank output matrix.")] = None,
    objective: Annotated[
        Literal["text", "argmax", "distil"],
        Option("--objective", help="Learn the text, the model's likeliest tokens, or its probabilities of them."),
    ] = "distil",
    start: Annotated[
        Literal["fitted", "last"],
        Option("--start", help="As the next layers, the output fitted to the text; or as the model's last ones."),
    ] = "fitted",
    epochs: Annotated[int, Option("--epochs", help="Passes over the data.")] = 4,
    lr: Annotated[float, Option("--lr", help="Highest learning rate.")] = 1e-3,
    warmup: Annotated[float, Option("--warmup", help="Share of the steps.")] = 0.05,
    tokens: Annotated[int, Option("--tokens", help="Tokens a pass.")] = 2048,
    accumulate: Annotated[int, Option("--accumulate", help="Passes a step, over all processes.")] = 2,
    weight_decay: Annotated[float, Option("--weight-decay", help="Of matrices.")] = 0.01,
    clip: Annotated[float, Option("--clip", help="Largest norm of the gradient.")] = 1.0,
    max_length: Annotated[int, Option("--max-length", help="Longer samples are cut there.")] = 1024,
    held_back: Annotated[int, Option("--held-back", help="Samples to measure on.")] = 64,
    report: Annotated[int, Option("--report", help="Steps between measurements, and between checkpoints.")] = 100,
    keep: Annotated[int, Option("--keep", help="Latest checkpoints that stay.")] = 2,
    store: Annotated[
        bool | None, Option("--store/--no-store", help="Compute the frozen layers once, into a file; default on CPU.")
    ] = None,
    seed: Annotated[int, Option("--seed", min=0, help="Of the order of the data.")] = 0,
    device: Annotated[
        Literal["cpu", "cuda"] | None, Option("--device", help="Default: a GPU where there is one.")
    ] = None,
    tier: Annotated[str | None, Option("--tier", help="Of the frozen layers.")] = None,
    resume: Annotated[bool, Option("--resume", help="Go on with a training that was stopped.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train the exit head of the drafter early-exit; runs under `accelerate launch` too."""
    from paceline.training.early_exit import ExitConfig
    from paceline.training.trainer import TrainConfig

    training = TrainConfig(
        epochs=epochs,
        lr=lr,
        warmup=warmup,
        tokens=tokens,
        accumulate=accumulate,
        weight_decay=weight_decay,
        clip=clip,
        held_back=held_back,
        report=report,
        keep=keep,
        seed=seed,
    )
    gpu = device != "cpu" and _gpu()
    require(gpu or device != "cuda", "there is no CUDA device here")
    from accelerate import Accelerator

    from paceline.training.assemble import early_exit as assemble
    from paceline.training.trainer import Trainer

    accelerator = Accelerator(cpu=not gpu, mixed_precision="bf16" if gpu else "no")
    config = ExitConfig(
        layers=layers,
        exit_layers=exit_layers,
        vocab=vocab or None,
        rank=rank,
        start=start,
        objective=objective,
        max_length=max_length,
        stored=not gpu if store is None else store,
    )
    with _bar(accelerator.is_main_process) as bar:
        frozen = bar.add_task("frozen layers: tokens", total=None)
        made = assemble(
            model,
            data,
            config,
            training,
            accelerator.device,
            tier,
            lambda done, of: bar.update(frozen, completed=done, total=of),
        )
        bar.remove_task(frozen)
        out = out or made.home
        trainer = Trainer(made.task, made.data, training, out, accelerator, settings=made.settings, resume=resume)
        bar.console.print(_about(made), soft_wrap=True, highlight=False)
        steps = bar.add_task("", total=len(trainer.steps), completed=trainer.step)

        def told(now: Report) -> None:
            speed = "" if now.loss is None else f"loss {now.loss:.3f}, {now.tokens_per_s:,.0f} tokens/s"
            bar.update(steps, completed=now.step, description=speed)
            if now.measured:
                line = "; ".join(filter(None, [f"step {now.step} of {now.of}", _figures(now.measured), speed]))
                bar.console.print(line, soft_wrap=True, highlight=False)

        measured = trainer.run(told)
    if not accelerator.is_main_process:
        return
    if as_json:
        print_json({"out": str(out), "steps": trainer.step, **measured})
    else:
        print(_figures(measured))
        print(f"stored in {out}", file=sys.stderr)


def _gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _about(made: Assembled) -> str:
    counts = made.task.head.parameter_counts()
    parts = ", ".join(f"{part} {count:,}" for part, count in counts.items() if part != "total")
    return f"parameters: {made.total:,} of the model; {made.loaded:,} loaded; {counts['total']:,} trained ({parts})"


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
