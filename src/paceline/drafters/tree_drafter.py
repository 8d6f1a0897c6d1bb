"""Moved to `paceline.drafting.tree_drafter`; goes with the release after 0.2."""

from paceline.drafting.tree_drafter import TreeDrafter, reach
from paceline.drafting.tree_drafter import max_candidates as most_nodes
from paceline.moved import warn_moved

warn_moved(__name__, "paceline.drafting.tree_drafter")

__all__ = ["TreeDrafter", "most_nodes", "reach"]
