"""Progress bars on stderr for the slow first use of a model."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

Stage = Callable[[str, int], Callable[[int], None]]


@contextmanager
def bars(show: bool) -> Iterator[Stage]:
    """Yields `stage(description, total)`, which adds a bar and returns the function that sets how far it is. There are
    bars on a terminal alone.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
    )
    # the stream of now: the conversion silences sys.stderr while the bar moves on
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, disable=not (show and console.is_terminal)) as progress:

        def stage(description: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(description, total=total)
            return lambda done: progress.update(task, completed=done)

        yield stage
