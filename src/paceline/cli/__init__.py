"""The command line: `paceline generate | chat | profile | bench | …`."""

from paceline.cli.app import main

__all__ = ["main"]
