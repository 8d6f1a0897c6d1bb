"""Where the exit head of a model is."""

from __future__ import annotations

from pathlib import Path

from paceline.drafters.early_exit.head import CONFIG, read_facts
from paceline.drafters.skip_set import model_key
from paceline.errors import OptionError
from paceline.targets import store
from paceline.targets.target import Target

SHIPPED = Path(__file__).parents[2] / "checkpoints"


def stored_path(target: Target) -> Path:
    """Where training keeps this model's head unless it is told otherwise: the user's cache."""
    return store.root() / "early-exit" / model_key(target)


def find_head(target: Target) -> Path:
    """The folder of this model's exit head: the user's own, or else the one that comes with paceline.

    Raises:
        OptionError: there is none.
    """
    shipped = (path.parent for path in sorted(SHIPPED.glob(f"*/{CONFIG}")))
    for folder in (stored_path(target), *shipped):
        if (folder / CONFIG).is_file() and read_facts(folder).get("target") == model_key(target):
            return folder
    raise OptionError(
        f"early-exit: there is no trained exit head for {target.name}: make one with 'paceline train early-exit', or "
        "name its folder, as in early-exit:head=FOLDER"
    )
