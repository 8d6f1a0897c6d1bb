"""Medusa's sparse trees (Cai et al., 2024, section 2.3.3): the likeliest paths of guesses that do not depend on one
another.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple


class Choice(NamedTuple):
    chance: float  # that it is right at its depth, whatever stands before it
    token: int


class Node(NamedTuple):
    score: float  # the chances along its path, multiplied
    parent: int
    token: int
    depth: int


def likeliest(choices: Sequence[Sequence[Choice]], nodes: int, min_score: float = 0.0) -> list[Node]:
    """The `nodes` likeliest paths, each after its parent: node i here is node i + 1 of a tree, whose root is 0. The
    likeliest come first, so that a smaller tree is the beginning of a larger one.

    Args:
        choices: of each depth, the likeliest first.
        min_score: no path that scores this or less.
    """
    found = [Node(1.0, -1, -1, 0)]
    heap: list[tuple[float, int, int]] = []

    def offer(parent: int, rank: int) -> None:
        above = found[parent]
        if above.depth < len(choices) and rank < len(choices[above.depth]):
            score = above.score * choices[above.depth][rank].chance
            if score > min_score:
                heappush(heap, (-score, parent, rank))

    offer(0, 0)
    while heap and len(found) <= nodes:
        score, parent, rank = heappop(heap)
        depth = found[parent].depth
        found.append(Node(-score, parent, choices[depth][rank].token, depth + 1))
        offer(len(found) - 1, 0)
        offer(parent, rank + 1)
    return found[1:]
