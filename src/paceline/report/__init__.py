"""Reports as one HTML file each: no script, nothing fetched, readable on a phone, light and dark."""

from paceline.report.charts import Bar, Interval, Series, bars, colour, intervals, lines, shade
from paceline.report.page import DataTable, Figure, Section, Swatch, render, swatch

__all__ = [
    "Bar",
    "DataTable",
    "Figure",
    "Interval",
    "Section",
    "Series",
    "Swatch",
    "bars",
    "colour",
    "intervals",
    "lines",
    "render",
    "shade",
    "swatch",
]
