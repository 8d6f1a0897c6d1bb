"""Measure methods side by side under one clock: `run(BenchConfig(...))`, then `print_summary`."""

from paceline.bench.config import BenchConfig
from paceline.bench.metrics import Row
from paceline.bench.runner import Summary, run
from paceline.bench.summary import print_summary

__all__ = ["BenchConfig", "Row", "Summary", "print_summary", "run"]
