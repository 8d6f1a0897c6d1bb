"""In which order calls are made: all methods take turns, prompt by prompt."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from paceline.bench.journal import Journal, Key, Run

if TYPE_CHECKING:
    from paceline.bench.config import BenchConfig
    from paceline.bench.methods import Generated
    from paceline.bench.suites import Prompt


class Named(Protocol):
    """What is compared; results tell it by its name."""

    name: str


N = TypeVar("N", bound=Named)
T = TypeVar("T")


class Item(NamedTuple):
    """What all methods do before the next one comes: a turn of a batch of conversations at a temperature."""

    prompts: list[Prompt]
    turn: int
    temperature: float
    number: int  # of the batch
    seed: int  # of its first prompt

    def key(self, method: str) -> Key:
        return method, self.temperature, tuple(prompt.id for prompt in self.prompts), self.turn

    def run(self, method: str, made: Generated, prompt_tokens: list[int]) -> Run:
        """What a method made of it."""
        return Run(
            method=method,
            temperature=self.temperature,
            task=self.prompts[0].task,
            ids=[prompt.id for prompt in self.prompts],
            turn=self.turn,
            prompt_tokens=prompt_tokens,
            **vars(made),
        )


def items(batches: Sequence[list[Prompt]], config: BenchConfig) -> Iterator[Item]:
    """All that is to be done, one temperature after the other."""
    for temperature in config.each_temperature:
        seed = config.seed
        for number, batch in enumerate(batches):
            for turn in range(len(batch[0].turns)):
                yield Item(batch, turn, temperature, number, seed)
            seed += len(batch)


def measure(
    methods: Sequence[N],
    asked: Sequence[Item],
    journal: Journal,
    call: Callable[[N, Item], Run],
    show: Callable[..., None],
) -> None:
    """Do what the journal does not have yet."""
    for item in asked:
        for method in taking_turns(methods, item.number):
            if item.key(method.name) not in journal.runs:
                show(description=f"{item.prompts[0].task}, {method.name}")
                journal.append(call(method, item))
                show(advance=1)


def taking_turns(methods: Sequence[T], number: int) -> list[T]:
    """The order for a prompt, always the same: each method is first as often as any other, and none comes after the
    same one each time, whatever that leaves behind.
    """
    first = number % len(methods)
    others = [*methods[:first], *methods[first + 1 :]]
    return [methods[first], *random.Random(number).sample(others, len(others))]


@contextmanager
def progress(
    wanted: bool, asked: Sequence[Item], methods: Sequence[str], journal: Journal
) -> Iterator[Callable[..., None]]:
    """A bar of what is done of all that is asked, on stderr, if wanted and on a terminal, as an error stands alone
    elsewhere; what it gives takes `rich.progress.Progress.update`'s arguments.
    """
    total, done = len(asked) * len(methods), sum(item.key(name) in journal.runs for item in asked for name in methods)
    columns = (
        TextColumn("{task.description}", markup=False),  # a task is called what users like
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (wanted and console.is_terminal)) as bar:
        yield partial(bar.update, bar.add_task("warming up", total=total, completed=done))
