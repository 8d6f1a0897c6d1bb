"""What the trainer trains: a task with one player, or with several that learn in turn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from paceline.errors import require
from paceline.training.objectives import OBJECTIVES, TEXT, WHOLE

if TYPE_CHECKING:
    from paceline.training.data.dataset import Batch

STORE_LIMIT = 32.0  # GB
LARGEST = 1e9  # of learning rates and the like; float32 ends at 3e38, which their products must not reach


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """What every drafter learns, and from what.

    Args:
        vocab: tokens it can draft, the most frequent of the text; None: all.
        objective: see `soft_labels`.
        max_length: longer samples are cut there.
        stored: keep the hidden states that it reads in files beside the data (see `FeatureStore`), of at most
            `store_limit` GB.
    """

    #: The objectives that it can learn by without the model's probabilities.
    without_probabilities: ClassVar[tuple[str, ...]] = (WHOLE, TEXT)

    vocab: int | None = None
    objective: str = "distil"
    max_length: int = 1024
    stored: bool = True
    store_limit: float = STORE_LIMIT

    def __post_init__(self) -> None:
        require(self.objective in OBJECTIVES, f"objective must be {', '.join(OBJECTIVES)}, not '{self.objective}'")
        require(self.vocab is None or self.vocab >= 1, f"vocab must be >= 1, not {self.vocab}")
        require(self.max_length >= 2, f"max-length must be >= 2, not {self.max_length}")
        require(self.store_limit > 0, f"store-limit must be > 0, not {self.store_limit}")


class Player(NamedTuple):
    """One who learns. In its turn its parameters change, and those of all others stand still."""

    name: str
    module: nn.Module  # a part of the task's
    loss: Callable[[Batch], Float[Tensor, ""]]  # summed over the labels
    lr: float = 1.0  # times the configured learning rate


class Task(ABC):
    """What is trained, and how that is measured.

    Attributes:
        counts: how many numbers `count` gives.
    """

    counts: int

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """All that checkpoints hold. In eval mode also when it learns: without dropout there are no random numbers to
        resume.
        """

    @property
    def players(self) -> list[Player]:
        """In the order of their turns, each once a step on the step's batches. The first is the drafter."""
        return [Player("head", self.module, self.loss)]

    @abstractmethod
    def loss(self, batch: Batch) -> Float[Tensor, ""]:
        """The drafter's, summed over the labels."""

    @abstractmethod
    def count(self, batch: Batch) -> Float[Tensor, " counts"]:
        """Counts that add up over batches, and over processes."""

    @abstractmethod
    def measure(self, counts: Float[Tensor, " counts"]) -> dict[str, float]:
        """What the sums of these counts say, by name."""

    @abstractmethod
    def save(self, folder: Path, about: dict[str, Any]) -> None:
        """Write the drafter as it is used, and how it was trained."""

    def watch(self, losses: dict[str, float]) -> None:  # noqa: B027  (most have nothing to watch)
        """Look at the players' losses, by name, after every step."""

    def ends(self, measured: dict[str, float]) -> bool:
        """Whether training ends here, seeing what was measured; asked once a measurement, and when it resumes with {}.

        What it remembers belongs into the module, where checkpoints keep it.
        """
        return False
