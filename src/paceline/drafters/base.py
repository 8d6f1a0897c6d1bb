"""Moved to `paceline.drafting.base` and `paceline.drafting.autoregressive`; goes with the release after 0.2."""

from paceline.drafting.autoregressive import AutoregressiveDrafter, Step
from paceline.drafting.base import Drafter, Row
from paceline.moved import warn_moved

warn_moved(__name__, "paceline.drafting.base")

__all__ = ["AutoregressiveDrafter", "Drafter", "Row", "Step"]
