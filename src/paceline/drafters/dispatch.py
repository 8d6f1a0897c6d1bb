"""Several drafters in one batch: each request is drafted for by the one that it names."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

from jaxtyping import Float
from torch import Tensor

from paceline.drafters.prediction import Prediction
from paceline.drafting.base import Drafter, Row
from paceline.drafting.row_view import RowView
from paceline.drafting.tree import TokenTree
from paceline.errors import require
from paceline.policies.fixed import Fixed
from paceline.targets.cache import KVCache
from paceline.targets.span import Span
from paceline.targets.target import PassOutput, Target

log = logging.getLogger("paceline")

GRAMMAR = "grammar"  # the source of tokens that are forced

Hidden = dict[int, Float[Tensor, "tokens hidden"]]


class Seat(RowView):
    """A request as one of the drafters sees it: with a row of that drafter's own."""

    def __init__(self, row: Row, policy: Any, shared: bool) -> None:
        super().__init__(row, policy)
        self.row, self.shared = row, shared
        self.place = 0  # in the drafter's own buffers

    @property
    def slot(self) -> int:
        return self.row.slot if self.shared else self.place


class Desk:
    """A drafter and the requests that it sees."""

    def __init__(self, name: str, drafter: Drafter) -> None:
        self.name, self.drafter, self.shared = name, drafter, drafter.shares_cache
        self.seats: list[Seat] = []
        self.started, self.closed = False, False

    def join(self, row: Row, hidden: Hidden) -> None:
        # The request's own policy is asked by one drafter alone; what is predicted is drafted as far as may be.
        policy = Fixed(k=row.policy.limit) if self.name == Prediction.source else row.policy
        seat = Seat(row, policy, self.shared)
        seat.place = len(self.seats)
        self.drafter.begin(seat, hidden)
        self.seats.append(seat)
        row.state[self.name] = seat

    def leave(self, row: Row) -> None:
        """Drop a request's seat; the last one takes its place."""
        seat: Seat = row.state.pop(self.name)
        self.drafter.end(seat)
        self.seats.remove(seat)
        last = len(self.seats)
        if self.shared or seat.place == last:  # a shared cache's rows are moved with the batch's
            return
        moved = next(other for other in self.seats if other.place == last)
        self.drafter.move(last, seat.place)
        moved.place = seat.place

    def draft(self, rows: Sequence[Row], trees: list[TokenTree], chosen: Sequence[str]) -> None:
        """Put its trees where there is none yet, for those rows that it is chosen for."""
        self.seats.sort(key=lambda seat: seat.slot)
        self.drafter.others = len(rows) - len(self.seats)
        for seat in self.seats:
            at = seat.row.slot
            seat.asked = chosen[at] == self.name and trees[at].drafted == 0
            seat.tree, seat.places = trees[at], [0]
        for seat, tree in zip(self.seats, self.drafter.draft(self.seats), strict=True):
            if seat.row.constraint and not self.shared:
                tree = tree.without(seat.row.constraint.refused(seat.row.ids, tree))
            seat.tree = tree.best_chain() if self.drafter.target.chains_only else tree  # as the engine has it
            if seat.asked:
                trees[seat.row.slot], seat.places = seat.tree, list(range(len(seat.tree)))

    def observe(self, row: Row, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        seat: Seat = row.state[self.name]
        if seat.tree is tree:
            self.drafter.observe(seat, tree, path, out)
            return
        own = seat.follow(tree, path)
        self.drafter.observe(seat, seat.tree, own, out.at(seat.places))

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Where its drafter fails its requests go on without drafts."""
        try:
            yield
        except Exception as error:
            log.warning("drafter '%s' failed at %s: its requests are decoded plainly", self.name, what, exc_info=error)
            for seat in self.seats:
                seat.row.state.pop(self.name, None)  # a row that is leaving has none any more
            self.seats, self.closed = [], True


class Dispatch(Drafter):
    """Each request names its drafter (`row.drafter`; by default the first), and all are verified in one pass.

    A drafter sees its own requests only, in rows 0, 1, … of its own buffers. One that drafts on the target's cache
    must be the first, and sees every request, not asked where another drafts. What a request predicts is drafted before
    anything else is. Where a grammar leaves no choice, its tokens join what was drafted, and candidates that it refuses
    are left out. A drafter that fails leaves its requests to plain decoding and the log says so; it is used again when
    all of the batch have ended.

    Raises:
        OptionError: a drafter that drafts on the target's cache is not the first.
    """

    def __init__(self, target: Target, drafters: Mapping[str, Drafter]) -> None:
        super().__init__(target)
        self.first, *others = drafters
        for name in others:
            require(
                not drafters[name].shares_cache,
                f"'{name}' drafts on the target's own cache: it can only be the default drafter",
            )
        self.parts, main = list(drafters.values()), drafters[self.first]
        self.default_policy, self.source = main.default_policy, main.source
        self.hidden_width, self.folder = main.hidden_width, main.folder
        self.taps = tuple({tap for part in self.parts for tap in part.taps})
        self.shares_cache = main.shares_cache
        self.needs_trees = any(part.needs_trees for part in self.parts)
        prediction = Prediction(target)
        self.desks = {name: Desk(name, part) for name, part in {prediction.source: prediction, **drafters}.items()}
        self._rows = 0
        self._cache: ref[KVCache]  # the engine's, which it may give back without a word

    # -- rows ------------------------------------------------------------------------------------------------------
    def max_nodes(self, depth: int) -> int:
        return max(desk.drafter.max_nodes(depth) for desk in self.desks.values()) + depth  # that are forced

    def drafted_for(self, row: Row, tree: TokenTree) -> Drafter | None:
        name = row.drafter or self.first
        seat: Seat | None = row.state.get(name)
        return self.desks[name].drafter if seat and seat.asked and seat.tree is tree else None

    def start(self, cache: KVCache) -> None:
        self._rows, self._cache = 0, ref(cache)
        for desk in self.desks.values():
            desk.seats, desk.started = [], False
            self._open(desk)

    def _open(self, desk: Desk) -> None:
        """Have its drafter ready, or ready again."""
        with desk.guarded("its start"):
            if not desk.started:
                cache = self._cache()
                assert cache is not None
                desk.drafter.start(cache)
            desk.started, desk.closed = True, False

    def begin(self, row: Row, hidden: Hidden) -> None:
        row.state = {}
        if self._rows == 0:
            for desk in self.desks.values():
                self._open(desk)
        wanted = [row.drafter or self.first]
        if self.shares_cache and self.first not in wanted:
            wanted.append(self.first)
        if row.prediction:
            wanted.append(Prediction.source)
        for name in wanted:
            if not self.desks[name].closed:
                with self.desks[name].guarded("a prompt"):
                    self.desks[name].join(row, hidden)
        self._rows += 1

    def end(self, row: Row) -> None:
        for name in list(row.state):
            with self.desks[name].guarded("an end"):
                self.desks[name].leave(row)
        self._rows -= 1

    def move(self, source: int, target: int) -> None:
        desk = self.desks[self.first]
        if self.shares_cache and desk.seats:
            with desk.guarded("a move"):
                desk.drafter.move(source, target)

    # -- a round ---------------------------------------------------------------------------------------------------
    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        self.reads_logits = any(desk.seats and desk.drafter.reads_logits for desk in self.desks.values())
        trees = [TokenTree.root(row.ids[-1]) for row in rows]
        chosen = [row.drafter or self.first for row in rows]
        predicting = [Prediction.source] * len(rows)
        for name, desk in self.desks.items():
            if desk.seats:
                with desk.guarded("a draft"):
                    desk.draft(rows, trees, predicting if name == Prediction.source else chosen)
        return [self._with_forced(row, tree) for row, tree in zip(rows, trees, strict=True)]

    def _with_forced(self, row: Row, tree: TokenTree) -> TokenTree:
        """A drafter's tree, and the tokens that there is no way around."""
        most = min(row.room, row.policy.limit)
        if not row.constraint or most < 1 or (self.target.chains_only and tree.drafted):
            return tree
        forced = row.constraint.forced(row.ids, most)
        if not forced:
            return tree
        both = tree.keep(range(1, len(tree)))  # the drafter goes on seeing its own
        both.add_path(forced, GRAMMAR)
        return both

    def enter(
        self, rows: Sequence[Row], trees: Sequence[TokenTree], span: Span, cache: KVCache
    ) -> tuple[int, Float[Tensor, "batch width hidden"] | None]:
        desk = self.desks[self.first]
        if desk.shared and desk.seats:
            with desk.guarded("a pass"):
                return desk.drafter.enter(desk.seats, trees, span, cache)
        return 0, None

    def asked_for(self, row: Row, tree: TokenTree, path: list[int]) -> tuple[int, int] | None:
        seat: Seat | None = row.state.get(row.drafter or self.first)
        if not seat or not seat.asked:  # its prediction was drafted
            return None
        drafted = seat.tree.drafted  # nodes after these are a grammar's
        return seat.tree.depth, sum(0 < node <= drafted for node in path)

    def observe(self, row: Row, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        for name in list(row.state):
            with self.desks[name].guarded("an outcome"):
                self.desks[name].observe(row, tree, path, out)
