"""Echo: the last token again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.drafting.base import Drafter, Row
from paceline.drafting.tree import TokenTree
from paceline.errors import require

if TYPE_CHECKING:
    from paceline.targets.target import Target


class Echo(Drafter):
    """Args:
    k_max: most tokens to propose; the policy may want fewer.
    """

    default_policy = "fixed:k=3"
    source = "echo"

    def __init__(self, target: Target, *, k_max: int = 3) -> None:
        super().__init__(target)
        require(k_max >= 1, f"echo: k_max must be >= 1, not {k_max}")
        self.k_max = k_max

    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        return [self._echo(row, row.ids[-1]) for row in rows]

    def _echo(self, row: Row, token: int) -> TokenTree:
        tree, node = TokenTree.root(token), 0
        # `more` is asked before a token is worked out, `keep` when its distribution is known: None is a point mass.
        while tree.depth < min(row.room, self.k_max) and row.policy.more(tree.depth):
            if not row.policy.keep(None, tree.depth):
                break
            node = tree.add(token, node, self.source)
        return tree
