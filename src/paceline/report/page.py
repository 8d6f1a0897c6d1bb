"""The page: sections of tables and figures, put into one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from paceline.report.charts import colour


class Swatch(NamedTuple):
    """A line of a legend; `kind` is the class of the marks, as of `colour` or `shade`."""

    name: str
    kind: str


@dataclass(frozen=True)
class DataTable:
    """Cells are text, or `Markup` to be taken as it is; those of the first column are its rows' names."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """A chart with a title, and with `data`, the figures it shows."""

    title: str
    chart: Markup
    about: str = ""
    legend: Sequence[Swatch] = ()
    data: DataTable | None = None


@dataclass(frozen=True)
class Section:
    """Everything but the title may be left out.

    Attributes:
        terms: what words in the tables mean, by word; folded.
        facts: by name.
        body: markup that follows all others.
    """

    title: str
    about: str = ""
    tables: Sequence[DataTable] = ()
    terms: Sequence[tuple[str, str]] = ()
    figures: Sequence[Figure] = ()
    facts: Sequence[tuple[str, str]] = ()
    body: Markup | None = None


def swatch(name: str, number: int) -> Markup:
    """A name after its series' colour."""
    return Markup('<i class="swatch {}"></i>{}').format(colour(number), name)


def render(
    title: str, subtitle: str, sections: Sequence[Section], *, wrong: Sequence[str] = (), notes: Sequence[str] = ()
) -> str:
    """The page as HTML. All text is escaped; only `Markup` is not.

    Args:
        wrong, notes: lines in front of all sections; what is wrong stands out.
    """
    style = Markup(files("paceline.report").joinpath("page.css").read_text("utf-8"))
    facts = {"title": title, "subtitle": subtitle, "sections": sections, "wrong": wrong, "notes": notes}
    return _environment().get_template("page.html").render(facts, style=style)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("paceline.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
