"""Measure methods side by side under one clock: `run(BenchConfig(...))`, then `print_summary`."""

from paceline.bench.config import BenchConfig
from paceline.bench.metrics import ResultRow
from paceline.bench.runner import Summary, run
from paceline.bench.summary import print_summary

__all__ = ["BenchConfig", "ResultRow", "Summary", "print_summary", "run"]
