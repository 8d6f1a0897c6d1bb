"""`paceline train guide`: what chooses among the n-grams' candidates, for a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from paceline.cli.options import grouped
from paceline.cli.train.run import Training, run

if TYPE_CHECKING:
    from paceline.training.heads.prepare import PreparedTraining, TrainingPlan


@grouped
def guide(
    training: Training,
    rank: Annotated[int, Option("--rank", help="Numbers that it makes of a state and a token.")] = 256,
    inner: Annotated[int, Option("--inner", help="Size of its hidden layer.")] = 256,
    matrix: Annotated[
        str, Option("--matrix", help="Folder of an n-gram matrix that was made of other text; auto; none.")
    ] = "auto",
    init: Annotated[str, Option("--init", help="Folder of a trained guide of this rank and size to go on from.")] = "",
) -> None:
    """Train the guide of the drafters auto and trigram; runs under `accelerate launch` and `torchrun` too."""

    def prepare(plan: TrainingPlan, stored: bool) -> PreparedTraining:
        from paceline.training.heads.guide import GuideOptions, prepare_guide

        config = GuideOptions(rank=rank, inner=inner, matrix=matrix, init=init, **training.task(0, stored))
        return prepare_guide(training.model, training.data, config, plan)

    run(training, prepare)
