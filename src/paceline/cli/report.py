"""`paceline report`: the page of results that are there already."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(folder: Annotated[Path, typer.Argument(help="Folder of paceline bench, or of a training.")]) -> None:
    """Write report.html into a folder of results, or curves.html into that of a training."""
    from paceline.bench.report import write_report
    from paceline.training.curves import METRICS, write_curves

    print((write_curves if (folder / METRICS).exists() else write_report)(folder))
