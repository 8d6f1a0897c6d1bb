"""Drafters that draft for one request side by side: what each of them sees of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from paceline.drafting.base import Row
from paceline.drafting.tree import TokenTree


class RowView:
    """A request as one of several drafters sees it: with a state, a tree and a policy of its own. What else it
    asks for is the request's. In a round that others draft in it is not `asked`.

    Attributes:
        tree: what the drafter drafted in this round.
        places: where the tree that is verified has the nodes of `tree`.
    """

    def __init__(self, row: Row, policy: Any) -> None:
        self._row, self.policy = row, policy
        self.state: Any = None
        self.asked = True
        self.tree: TokenTree
        self.places: list[int]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._row, name)

    @property
    def room(self) -> int:
        return self._row.room if self.asked else 0

    def begin_round(self, hidden: Mapping[int, Float[Tensor, "token hidden"]], layers: int) -> None:
        """Show its policy the target's last hidden state, as engines do to the request's own."""
        if self.policy.reads_hidden and len(hidden[layers]):
            self.policy.begin_round(hidden[layers][-1])

    def outcome(self, merged: TokenTree, path: Sequence[int]) -> tuple[int, int]:
        """How deep it drafted, as far as that was verified, and how many of these tokens were accepted."""
        own: list[int | None] = [0]  # by node of the merged tree
        for parent, token in zip(merged.parents[1:], merged.tokens[1:], strict=True):
            above = own[parent]
            own.append(None if above is None else self.tree.child(above, token))
        verified = (depth for depth, node in zip(merged.depths, own, strict=True) if node is not None)
        return max(verified), sum(own[node] is not None for node in path[1:])

    def follow(self, merged: TokenTree, path: list[int]) -> list[int]:
        """The accepted nodes as this drafter sees them: others' become nodes of its tree, after its own."""
        nodes: list[int] = []
        for place in path:
            if place not in self.places:
                self.tree.add(merged.tokens[place], nodes[-1], merged.sources[place])
                self.places.append(place)
            nodes.append(self.places.index(place))
        return nodes
