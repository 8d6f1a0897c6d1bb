"""No drafting: plain autoregressive decoding in paceline's own runtime."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.drafting.base import Drafter, Row
from paceline.drafting.tree import TokenTree


class NoDrafter(Drafter):
    def max_nodes(self, depth: int) -> int:
        return 0

    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        return [TokenTree.root(row.ids[-1]) for row in rows]
