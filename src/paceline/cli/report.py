"""`paceline report`: the page of results that are there already."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import given_path
from paceline.errors import OptionError


def report(
    folder: Annotated[Path, typer.Argument(parser=given_path, help="Folder of paceline bench, or of a training.")],
) -> None:
    """Write report.html into a folder of results, or curves.html into that of a training."""
    if folder.is_file():
        raise OptionError(f"{folder} is a file: name the folder of the results")
    from paceline.bench.report import write_report
    from paceline.training.curves import METRICS, write_curves

    print((write_curves if (folder / METRICS).exists() else write_report)(folder))
