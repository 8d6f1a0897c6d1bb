"""`curves.html`: how a training went, as one page beside its checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.errors import OptionError, first_line
from paceline.files import whole
from paceline.report import DataTable, Figure, Section, Series, Swatch, colour, lines, render
from paceline.training.checkpoints import Checkpoints

METRICS, CURVES = "metrics.jsonl", "curves.html"
POINTS = 150  # of a line; each is a mean of as many steps as it takes

Points = list[tuple[float, float]]


def write_curves(folder: Path) -> Path:
    """Draw what `metrics.jsonl` of a training says, with the settings of its latest checkpoint; returns the file.

    Raises:
        OptionError: there is no such file, or it is damaged.
    """
    try:
        notes = [
            json.loads(line)
            for line in (folder / METRICS).read_text("utf-8").splitlines(keepends=True)
            if line.endswith("\n")
        ]
        text = curves(notes, folder.absolute().name, Checkpoints(folder, {}, 1).stored_settings())
    except FileNotFoundError as error:
        raise OptionError(f"{folder} holds no training: there is no {METRICS}") from error
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise OptionError(f"{folder / METRICS} is damaged: {type(error).__name__} {first_line(error)}") from error
    with whole(folder / CURVES) as file:
        file.write_text(text, "utf-8")
    return folder / CURVES


def curves(notes: Sequence[dict[str, float]], name: str, settings: dict[str, Any]) -> str:
    """The page.

    Args:
        notes: lines of `metrics.jsonl`, a step each; measurements on held-back samples are in some of them.
    """
    found: dict[str, Points] = {}
    for note in notes:
        for key, value in note.items():
            if key != "step" and math.isfinite(value):
                found.setdefault(key, []).append((note["step"], value))
    names = sorted((key for key in found if key.endswith("loss")), reverse=True)  # "loss", which is noisy, lies below
    losses = {key: found[key] for key in names}
    accepted = {key: points for key, points in found.items() if key.startswith("accepted")}
    others = {key: {key: points} for key, points in found.items() if key not in losses and key not in accepted}
    groups = {"Loss": losses, "Accepted drafts, by depth": accepted, **others}
    about = {
        "Loss": "Of the step's labels, a mean over some steps; held_back_loss: of samples that it does not learn from.",
        "Accepted drafts, by depth": "On samples held back: the share of places where the first n drafted tokens are "
        "all accepted.",
        "lr": "Learning rate.",
    }
    figures = [_figure(title, group, about.get(title, "")) for title, group in groups.items() if group]
    measured = [note for note in notes if note.keys() - {"step", "loss", "lr"} - losses.keys()]
    columns = [key for key in (measured[-1] if measured else {}) if key != "step"]
    rows = [[f"{note['step']:g}", *(_cell(note.get(key)) for key in columns)] for note in measured]
    sections = [Section("Curves", figures=figures)]
    if rows:
        sections.append(Section("Measurements", "On samples held back.", [DataTable(["step", *columns], rows)]))
    if settings:
        sections.append(Section("Settings", facts=[(key, json.dumps(value)) for key, value in settings.items()]))
    return render(f"paceline train: {name}", f"{notes[-1]['step']:g} steps", sections)


def _figure(title: str, group: dict[str, Points], about: str) -> Figure:
    drawn = [
        Series(name, number, list(_thinned(points))) for number, (name, points) in enumerate(group.items(), start=1)
    ]
    return Figure(title, lines(drawn, "step", ""), about, [Swatch(one.name, colour(one.colour)) for one in drawn])


def _thinned(points: Points) -> Iterator[tuple[float, float]]:
    size = -(-len(points) // POINTS)
    for at in range(0, len(points), size):
        part = points[at : at + size]
        yield fmean(step for step, _ in part), fmean(value for _, value in part)


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
