"""Several drafters at once: their trees become one, for which they share a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

from jaxtyping import Float
from torch import Tensor

from paceline.clock import now
from paceline.drafting.base import Drafter, Row
from paceline.drafting.batch_budget import spend
from paceline.drafting.budget import Budget, Deferred
from paceline.drafting.gate import Gate
from paceline.drafting.pool import Pool
from paceline.drafting.row_view import RowView
from paceline.drafting.stopwatch import Stopwatch
from paceline.drafting.tree import TokenTree
from paceline.drafting.tree_drafter import TreeDrafter, reach
from paceline.errors import OptionError, require
from paceline.registry import AUTO
from paceline.targets.cache import KVCache
from paceline.targets.span import Span
from paceline.targets.target import PassOutput, Target


@dataclass
class MergeState:
    """A request's state.

    Attributes:
        memory: by drafter without a model: what it remembers of the request.
        views: by any other: the request as it sees it.
        gates: by drafter whose candidates compete: whether to ask it; None: all are asked.
        length: tokens when it was last drafted for.
    """

    memory: dict[int, Any]
    views: dict[int, RowView]
    budget: Budget | None
    gates: dict[int, Gate] | None
    length: int = 0


class Merge(TreeDrafter):
    """Drafters with scores share the budget: the best candidates of all are taken, and what several propose stands
    once. Those without a model are asked first, in the order they are named, then heads with trees of scores; with
    `budget=auto` each only where what it adds has been worth its time (see `drafting.gate`). The tree of any other
    drafter (sampled tokens, or lookahead's branches) is taken whole and comes first.

    Sampled output stays exact. A sampled token is never left out or moved after another because of what it is, and a
    deterministic one only ever comes after sampled siblings, where it is a point mass that may depend on them.

    Args:
        drafters: their names, separated by "|", with options after ";" as in "suffix|trigram;order=2"; or drafters
            (from Python). Of two that propose the same with the same score, the first counts as its source.
        budget: most nodes that compete; "auto": as many as pay on this machine.
    """

    default_policy = "fixed:k=10"
    source = "merge"

    def __init__(self, target: Target, *, drafters: str = "", budget: int | str = AUTO) -> None:
        super().__init__(target, budget)
        self.parts = _named(drafters, target) if isinstance(drafters, str) else list(drafters)
        require(len(self.parts) > 1, "merge: name two drafters or more, as in merge:drafters=suffix|trigram")
        require(
            not any(isinstance(part, Merge) for part in self.parts),
            "merge: auto and other merges cannot be parts of one: name their drafters",
        )
        # By number: those without a model, heads with trees of scores, and those whose trees are taken whole.
        self.free = {at: part for at, part in enumerate(self.parts) if isinstance(part, TreeDrafter)}
        self.paid = {at: part for at, part in enumerate(self.parts) if part.competes}
        self.whole = {at: part for at, part in enumerate(self.parts) if at not in self.free and at not in self.paid}
        self.needs_trees = bool(self.whole) or any(part.needs_trees for part in self.parts)
        self.shares_cache = any(part.shares_cache for part in self.parts)
        self.reads_logits = any(part.reads_logits for part in self.parts)
        self.taps = tuple({tap for part in self.parts for tap in part.taps})
        self.reads_costs = self.auto or any(part.reads_costs for part in self.parts)
        self.random = Random(0)
        self.known = {at: Gate() for at in (*self.free, *self.paid)}  # what greedy requests have shown, and others
        self.known_of_samples = {at: Gate(greedy, tells=False) for at, greedy in self.known.items()}
        self.stopwatches = {at: Stopwatch(patient=at in self.paid) for at in self.known}
        self.waking = {at: Stopwatch(patient=True) for at in self.paid}  # reading what came while it was not asked

    def max_nodes(self, depth: int) -> int:
        merged = self.max_candidates + sum(part.max_nodes(depth) for part in self.whole.values())
        # A head's own cache has as many slots, and holds all nodes that it drafts from.
        return max([merged, *(part.max_nodes(depth) for part in self.paid.values())])

    def start(self, cache: KVCache) -> None:
        for part in self.parts:
            part.start(cache)

    def begin(self, row: Row, hidden: dict[int, Float[Tensor, "tokens hidden"]]) -> None:
        memory = {at: free.remember(row) for at, free in self.free.items()}
        views = {at: RowView(row, row.policy.for_part(at)) for at in (*self.paid, *self.whole)}
        known = self.known_of_samples if row.sampling else self.known
        gates = {at: Gate(before) for at, before in known.items()} if self.auto else None
        row.state = state = MergeState(memory, views, self.new_budget(row) if self.auto else None, gates)
        for at, view in views.items():
            view.begin_round({tap: entered[-1:] for tap, entered in hidden.items()}, self.target.num_layers)
            self.parts[at].begin(view, hidden)
            if at in self.paid:
                view.state.budget = Deferred(state.budget)

    # -- a round ---------------------------------------------------------------------------------------------------
    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        trees, together = [TokenTree.root(row.ids[-1]) for row in rows], len(rows) + self.others
        self.sharing, sampling = together, any(row.sampling for row in rows)
        if self.auto and not self.whole and self.pause.pauses(together, sampling):
            for row, at in product(rows, self.paid):
                row.state.views[at].asked = False
            return trees
        began = now()
        views: dict[int, list[Any]] = {at: [row.state.views[at] for row in rows] for at in self.whole}
        # The first drafts last: the target's pass may go on from what it left in the cache (see `enter`).
        drafts = {at: self.whole[at].draft(views[at]) for at in reversed(self.whole)}
        for at in self.whole:
            for view, own, tree in zip(views[at], drafts[at], trees, strict=True):
                view.tree, view.places = own, _copy(own, tree)
        pools = [self._pool(row, together, tree.drafted) for row, tree in zip(rows, trees, strict=True)]
        depths = [reach(row) for row in rows]
        self._gather(rows, pools, depths)
        if not self.auto:
            return [_graft(pool.best(self.max_candidates), tree) for pool, tree in zip(pools, trees, strict=True)]
        # A row that wants no draft, as while a prediction is drafted for it, tells nothing of what drafts are worth.
        asked = [at for at, tree in enumerate(trees) if depths[at] or tree.drafted]
        if asked:
            spent = spend([pools[at].share for at in asked], together)
            self.pause.learn(together, spent.gain, spent.rate, now() - began, sampling)
            for at, own in zip(asked, spent.trees, strict=True):
                trees[at] = _graft(own, trees[at])
        return trees

    def _pool(self, row: Row, rows: int, others: int) -> Pool:
        state: MergeState = row.state
        state.length = len(row.ids)
        return Pool(row.ids[-1], state.length, state.budget, state.gates, rows, others, self.max_candidates)

    def _gather(self, rows: Sequence[Row], pools: Sequence[Pool], depths: Sequence[int]) -> None:
        """Fill the pools with the candidates of all drafters that are asked, the cheap ones first."""
        open_rows = [row for row in rows if depths[row.slot]]
        for at, stopwatch in self.stopwatches.items():
            asked = [row for row in open_rows if pools[row.slot].asks(at, self._takes(at, row), self.random)]
            if at in self.paid:
                self._wake(at, rows, asked)
            if not asked:
                stopwatch.idle()
                continue
            started = now()
            found = self._proposed(at, rows, asked, depths)
            for row in asked:
                pools[row.slot].take(at, found[row.slot], stopwatch.seconds)
            stopwatch.learn((now() - started) / len(asked))  # what stands there is weighed again, which takes time, too

    def _takes(self, at: int, row: Row) -> float:
        """Seconds that asking a drafter is thought to take: more where it has to catch up first."""
        seconds = self.stopwatches[at].seconds
        return seconds if at in self.free or row.state.views[at].asked else seconds + self.waking[at].seconds

    def _wake(self, at: int, rows: Sequence[Row], asked: Sequence[Row]) -> None:
        """Tell a paid drafter which rows it is about to draft for, so that it reads what came while it was not asked.
        That happens once, and says nothing of what asking every round takes: it is timed by itself.
        """
        views = [row.state.views[at] for row in rows]
        woken = 0
        for row, view in zip(rows, views, strict=True):
            woken += row in asked and not view.asked
            view.asked = row in asked
        started = now()
        if asked:
            self.paid[at].catch_up(views)
        if woken:
            self.waking[at].learn((now() - started) / woken)
        else:
            self.waking[at].idle()

    def _proposed(
        self, at: int, rows: Sequence[Row], asked: Sequence[Row], depths: Sequence[int]
    ) -> dict[int, TokenTree]:
        """By slot of the rows that ask, what a drafter proposes."""
        if at in self.paid:
            views = [row.state.views[at] for row in rows]
            trees = self.paid[at].draft(views)
            for row in asked:
                own = trees[row.slot]
                views[row.slot].tree = own.keep(range(1, len(own)))  # others may add to it
            return {row.slot: trees[row.slot] for row in asked}
        found = {}
        for row in asked:
            state: MergeState = row.state
            least = state.budget.min_score(len(rows) + self.others) if state.budget else 0.0
            found[row.slot] = self.free[at].propose(row, state.memory[at], depths[row.slot], least)
        return found

    def enter(
        self, rows: Sequence[Row], trees: Sequence[TokenTree], span: Span, cache: KVCache
    ) -> tuple[int, Float[Tensor, "batch width hidden"] | None]:
        """Where the first of those says whose trees are taken whole: its nodes are the first of all. Paid drafters that
        draft on the target's cache have overwritten what it left there.
        """
        first = next(iter(self.whole), None)
        if first is None or any(part.shares_cache for part in self.paid.values()):
            return 0, None
        return self.whole[first].enter([row.state.views[first] for row in rows], trees, span, cache)

    def observe(self, row: Row, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        state: MergeState = row.state
        layers = self.target.num_layers
        if state.budget:
            state.budget.observe(row.ids[state.length :])
        for at, free in self.free.items():
            free.learn(row, state.memory[at], tree, path, out)
        for at, paid in self.paid.items():
            view = state.views[at]
            if view.asked:  # else its policy has not been asked either
                view.policy.observe(*view.outcome(tree, path))
            paid.observe(view, tree, path, out)
        for at, part in self.whole.items():
            view = state.views[at]
            depth, drafted = view.tree.depth, view.tree.drafted
            own = view.follow(tree, path)
            view.policy.observe(depth, sum(0 < node <= drafted for node in own))  # others' tokens are not its own
            part.observe(view, view.tree, own, out.at(view.places))
        for view in state.views.values():
            if view.policy.reads_hidden:
                view.begin_round({tap: hidden[path[-1:]] for tap, hidden in out.taps.items()}, layers)

    def end(self, row: Row) -> None:
        for at, free in self.free.items():
            free.forget(row, row.state.memory[at])
        for at, view in row.state.views.items():
            self.parts[at].end(view)

    def move(self, source: int, target: int) -> None:
        for part in self.parts:
            part.move(source, target)


def _named(drafters: str, target: Target) -> list[Drafter]:
    from paceline.drafters import DRAFTERS  # which names this module

    specs = [DRAFTERS.parse(name.replace(";", ":")) for name in drafters.split("|") if name]
    return [spec.build(target) for spec in specs]


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


def _graft(own: TokenTree, tree: TokenTree) -> TokenTree:
    """Add the deterministic nodes of `own` to `tree`, after those that are there or as one with them."""
    if not tree.drafted:
        return own
    places = [0]
    for node in range(1, len(own)):
        parent, token = places[own.parents[node]], own.tokens[node]
        there = tree.child(parent, token)
        places.append(there or tree.add(token, parent, own.sources[node], score=own.scores[node]))
    return tree
