"""Moved to `paceline.drafting.tree`; goes with the release after 0.2."""

from paceline.drafting.tree import TokenTree, tree_span
from paceline.moved import warn_moved

warn_moved(__name__, "paceline.drafting.tree")

__all__ = ["TokenTree", "tree_span"]
