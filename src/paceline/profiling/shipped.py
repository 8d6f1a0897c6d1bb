"""Profiles of other machines that come with paceline: see `data/profiles/README.md` for where they are from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.errors import OptionError
from paceline.files import at_home, read_json

FOLDER = Path(__file__).parents[1] / "data" / "profiles"


def shipped() -> list[str]:
    """Their names."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_profile(name: str) -> dict[str, Any]:
    """A profile as it is stored, by the path of its file, or the name of one that comes with paceline.

    Raises:
        OptionError: there is none, or the file is not JSON.
    """
    path = FOLDER / f"{name}.json" if name in shipped() else at_home(name)
    try:
        found: dict[str, Any] = read_json(path.read_text(encoding="utf-8"))
        return found
    except OSError as error:
        raise OptionError(f"there is no profile {name}: name a file, or one of {', '.join(shipped())}") from error
    except ValueError as error:
        raise OptionError(f"{name} is not a profile of paceline profile, or it is damaged") from error
