"""`paceline train early-exit`: an exit head for a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from paceline.cli.options import grouped
from paceline.cli.train.run import Training, run

if TYPE_CHECKING:
    from paceline.training.heads.prepare import PreparedTraining, TrainingPlan


@grouped
def early_exit(
    training: Training,
    layers: Annotated[int, Option("--layers", "-N", help="The model's layers below the head.")] = 4,
    exit_layers: Annotated[int, Option("--exit-layers", help="Layers of the head.")] = 1,
    vocab: Annotated[int, Option("--vocab", help="Tokens it can draft, the most frequent ones; 0: all.")] = 8192,
    rank: Annotated[int | None, Option("--rank", help="Of a low-rank output matrix.")] = None,
    start: Annotated[
        Literal["fitted", "last"],
        Option("--start", help="As the next layers, the output fitted to the text; or as the model's last ones."),
    ] = "fitted",
) -> None:
    """Train the exit head of the drafter early-exit; runs under `accelerate launch` and `torchrun` too."""

    def prepare(plan: TrainingPlan, stored: bool) -> PreparedTraining:
        from paceline.training.heads.early_exit import ExitConfig, prepare_early_exit

        config = ExitConfig(
            layers=layers,
            exit_layers=exit_layers,
            rank=rank,
            start=start,
            **training.task(vocab, stored),
        )
        return prepare_early_exit(training.model, training.data, config, plan)

    run(training, prepare)
