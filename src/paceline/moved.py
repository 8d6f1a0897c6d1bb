"""Old import paths of what plugins use: they work through one release and say where things are now."""

from __future__ import annotations

import warnings


def warn_moved(old: str, new: str) -> None:
    """Tell whoever imports `old` that it is `new` now."""
    # The importer's frame lies behind those of importlib, which warnings leave out of the count.
    warnings.warn(f"{old} has moved to {new}", DeprecationWarning, stacklevel=3)
