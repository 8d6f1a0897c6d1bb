"""Several drafters at once: their trees become one, for which they share a budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from paceline.drafting.base import Drafter, Row
from paceline.drafting.budget import best_first
from paceline.drafting.tree import TokenTree
from paceline.drafting.tree_drafter import TreeDrafter, TreeState, reach
from paceline.errors import OptionError, require
from paceline.targets.cache import KVCache
from paceline.targets.span import Span
from paceline.targets.target import PassOutput, Target


class Merge(TreeDrafter):
    """Drafters with scores share the budget: the best candidates of all are taken, and what several propose stands
    once. The tree of any other drafter (sampled tokens, or lookahead's branches) is taken whole and comes first.

    Sampled output stays exact. A sampled token is never left out or moved behind another because of what it is, and a
    deterministic one only ever comes behind sampled siblings, where it is a point mass that may depend on them.

    Args:
        drafters: their names, separated by "|", with options behind ";" as in "suffix|trigram;order=2"; or drafters
            (from Python). Of two that propose the same with the same score, the first counts as its source.
        budget: most nodes that compete; "auto": as many as pay on this machine.
    """

    default_policy = "fixed:k=10"
    source = "merge"

    def __init__(self, target: Target, *, drafters: str = "", budget: int | str = "auto") -> None:
        super().__init__(target, budget)
        from paceline.drafters import DRAFTERS  # which names this module

        if isinstance(drafters, str):
            specs = [DRAFTERS.parse(name.replace(";", ":")) for name in drafters.split("|") if name]
            self.parts: list[Drafter] = [spec.build(target) for spec in specs]
        else:
            self.parts = list(drafters)
        require(len(self.parts) > 1, "merge: name two drafters or more, as in merge:drafters=suffix|trigram")
        self.scored = {at: part for at, part in enumerate(self.parts) if isinstance(part, TreeDrafter)}
        self.whole = {at: part for at, part in enumerate(self.parts) if at not in self.scored}
        self.reads_costs = self.auto or any(part.reads_costs for part in self.parts)
        self.taps = tuple({tap for part in self.parts for tap in part.taps})

    def max_nodes(self, depth: int) -> int:
        return self.max_candidates + sum(part.max_nodes(depth) for part in self.whole.values())

    def start(self, cache: KVCache) -> None:
        for part in self.parts:
            part.start(cache)

    def begin(self, row: Row, hidden: dict[int, Float[Tensor, "tokens hidden"]]) -> None:
        super().begin(row, hidden)
        for at, part in self.whole.items():
            part.begin(row.state.memory[at], hidden)

    def remember(self, row: Row) -> list[Any]:
        """By drafter: what it remembers of the request, or the request as it sees it."""
        return [self.scored[at].remember(row) if at in self.scored else Part(row) for at in range(len(self.parts))]

    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        trees = [TokenTree.root(row.ids[-1]) for row in rows]
        views: dict[int, list[Any]] = {at: [row.state.memory[at] for row in rows] for at in self.whole}
        # The first drafts last: the target's pass may go on from what it left in the cache (see `enter`).
        drafts = {at: self.whole[at].draft(views[at]) for at in reversed(self.whole)}
        for at in self.whole:
            for view, own, tree in zip(views[at], drafts[at], trees, strict=True):
                view.tree, view.places = own, _copy(own, tree)
        for row, tree in zip(rows, trees, strict=True):
            _graft(self._chosen(row, row.state, len(rows), tree.drafted), tree)
        return trees

    def _chosen(self, row: Row, state: TreeState, rows: int, others: int) -> TokenTree:
        depth, state.length = reach(row), len(row.ids)
        if depth == 0:
            return TokenTree.root(row.ids[-1])
        tree = self.propose(row, state.memory, depth, state.budget.min_score(rows) if state.budget else 0.0)
        if state.budget:
            return state.budget.choose(tree, rows, others, state.length)
        order = [node for node, _ in best_first(tree, [score or 0.0 for score in tree.scores])]
        return tree.keep(order[: self.max_candidates])

    def propose(self, row: Row, memory: list[Any], depth: int, min_score: float) -> TokenTree:
        """All candidates of all drafters, in any number and order."""
        tree = TokenTree.root(row.ids[-1])
        places: dict[tuple[int, int], int] = {}
        for at, part in self.scored.items():
            own, to = part.propose(row, memory[at], depth, min_score), [0]
            for node in range(1, len(own)):
                key, score = (to[own.parents[node]], own.tokens[node]), own.scores[node] or 0.0
                if key not in places:
                    places[key] = tree.add(key[1], key[0], own.sources[node], score=score)
                elif score > (tree.scores[places[key]] or 0.0):
                    tree.scores[places[key]], tree.sources[places[key]] = score, own.sources[node]
                to.append(places[key])
        return tree

    def enter(
        self, rows: Sequence[Row], trees: Sequence[TokenTree], span: Span, cache: KVCache
    ) -> tuple[int, Float[Tensor, "batch width hidden"] | None]:
        """Where the first of those says whose trees are taken whole: its nodes are the first of all."""
        for at, part in self.whole.items():
            return part.enter([row.state.memory[at] for row in rows], trees, span, cache)
        return 0, None

    def observe(self, row: Row, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        super().observe(row, tree, path, out)
        for at, part in self.whole.items():
            view: Any = row.state.memory[at]
            own = view.follow(tree, path)
            taps = {tap: hidden[view.places] for tap, hidden in out.taps.items()}
            part.observe(view, view.tree, own, PassOutput(out.logits[view.places], taps))

    def learn(self, row: Row, memory: list[Any], tree: TokenTree, path: list[int], out: PassOutput) -> None:
        for at, part in self.scored.items():
            part.learn(row, memory[at], tree, path, out)

    def move(self, source: int, target: int) -> None:
        for part in self.parts:
            part.move(source, target)


class Part:
    """A request as one of the merged drafters sees it: with a state and a tree of its own."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self.state: Any = None
        self.tree: TokenTree
        self.places: list[int]  # where the merged tree has the nodes of `tree`

    def __getattr__(self, name: str) -> Any:
        return getattr(self._row, name)

    def follow(self, merged: TokenTree, path: list[int]) -> list[int]:
        """The accepted nodes as this drafter sees them: others' become nodes of its tree, behind its own."""
        nodes: list[int] = []
        for place in path:
            if place not in self.places:
                self.tree.add(merged.tokens[place], nodes[-1], merged.sources[place])
                self.places.append(place)
            nodes.append(self.places.index(place))
        return nodes


def _copy(own: TokenTree, tree: TokenTree) -> list[int]:
    """Add all nodes of `own` to `tree`, none of them shared with another drafter's; returns where they are."""
    if own.sampled:
        if tree.sampled and not (tree.replacement and own.replacement):
            raise OptionError("merge: trees that are drawn without replacement do not go with other sampled ones")
        tree.replacement = own.replacement
    places = [0]
    for node in range(1, len(own)):
        parent = places[own.parents[node]]
        places.append(tree.add(own.tokens[node], parent, own.sources[node], own.q[node], own.scores[node]))
    return places


def _graft(own: TokenTree, tree: TokenTree) -> None:
    """Add the deterministic nodes of `own` to `tree`, behind those that are there or as one with them."""
    places = [0]
    for node in range(1, len(own)):
        parent, token = places[own.parents[node]], own.tokens[node]
        there = tree.child(parent, token)
        places.append(there or tree.add(token, parent, own.sources[node], score=own.scores[node]))
