"""The command line: `paceline generate | chat | profile | bench | …`."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code: 0, 1 (an error), 2 (wrong usage) or 130 (interrupted)."""
    try:
        from paceline.cli import app  # takes a moment, in which one may have thought better of it

        return app.main(arguments)
    except KeyboardInterrupt:
        return 130
