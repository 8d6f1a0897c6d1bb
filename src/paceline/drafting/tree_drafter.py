"""What drafters of deterministic candidates share: the depth a policy wants, and the budget of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from paceline.clock import now
from paceline.drafting.base import Drafter, Row
from paceline.drafting.batch_budget import Share, spend
from paceline.drafting.budget import Budget
from paceline.drafting.lookup import DraftSource
from paceline.drafting.pause import Pause
from paceline.drafting.tree import TokenTree
from paceline.errors import require
from paceline.registry import AUTO
from paceline.targets.target import PassOutput, Target

MOST = {"cpu": 32, "cuda": 64}  # nodes that "auto" chooses among: a wider pass is nearly free on a GPU only
LARGEST = 4096  # budget: memory is taken for as many


@dataclass
class TreeState:
    """A request's state: what the drafter remembers of it, and how its budget is chosen."""

    memory: Any
    budget: Budget | None
    length: int = 0  # tokens when it was last drafted for


class TreeDrafter(Drafter):
    """A drafter whose candidates have scores (`TokenTree.scores`), of which a budget says how many are verified.

    Subclasses say what they remember of a request, what they propose for it, and what they learn from a round. They
    draw nothing at random, so that a candidate may be left out whatever it is.

    Args:
        budget: most nodes of a tree; "auto": as many as pay on this machine, see `drafting.budget`.
    """

    #: Whether it learns nothing of rounds in which it pauses. Learning then counts as a part of drafting.
    learning_pauses = False

    def __init__(self, target: Target, budget: int | str) -> None:
        super().__init__(target)
        self.auto, self.max_candidates = budget == AUTO, max_candidates(budget, target)
        self.reads_costs = self.auto
        self.pause, self.paused = Pause(), False
        self._learning = 0.0  # seconds that learning took since the last draft

    def remember(self, row: Row) -> Any:
        """What there is to remember of a request that joins; its prompt is in `row.ids`."""

    def propose(self, row: Row, memory: Any, depth: int, min_score: float) -> TokenTree:
        """At most `self.max_candidates` of them no deeper than `depth`, which is above 0; none is needed whose score is
        below `min_score`. The best come first: of two budgets the smaller one's tree is the beginning of the larger's.
        """
        raise NotImplementedError

    def learn(self, row: Row, memory: Any, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        """A round's outcome, as for `observe`."""

    def forget(self, row: Row, memory: Any) -> None:
        """A request has left."""

    def max_nodes(self, depth: int) -> int:
        return self.max_candidates

    def begin(self, row: Row, hidden: dict[int, Float[Tensor, "tokens hidden"]]) -> None:
        row.state = TreeState(self.remember(row), self.new_budget(row) if self.auto else None)

    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        trees, together = [TokenTree.root(row.ids[-1]) for row in rows], len(rows) + self.others
        self.sharing = together
        sampling = any(row.sampling for row in rows)
        self.paused = self.auto and self.pause.pauses(together, sampling)
        if self.paused:
            return trees
        shares: dict[int, Share] = {}
        began = now()
        for at, row in enumerate(rows):
            state: TreeState = row.state
            state.length, depth, budget = len(row.ids), reach(row), state.budget
            if depth == 0:
                continue
            trees[at] = self.propose(row, state.memory, depth, budget.min_score(together) if budget else 0.0)
            if budget:
                plan = budget.plan(trees[at], together, slots=state.length)
                shares[at] = Share(budget, plan, others=0, drafting=0.0, slots=state.length)
        if shares:
            spent = spend(list(shares.values()), together)
            for at, tree in zip(shares, spent.trees, strict=True):
                trees[at] = tree
            self.pause.learn(together, spent.gain, spent.rate, now() - began + self._learning, sampling)
        self._learning = 0.0
        return trees

    def observe(self, row: Row, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        state: TreeState = row.state
        if state.budget:
            state.budget.observe(row.ids[state.length :])
        if not self.learning_pauses:
            self.learn(row, state.memory, tree, path, out)
        elif not self.paused:
            began = now()
            self.learn(row, state.memory, tree, path, out)
            self._learning += now() - began

    def end(self, row: Row) -> None:
        self.forget(row, row.state.memory)


class LookupDrafter(TreeDrafter):
    """A drafter of what a source proposes that knows token ids only.

    Args:
        lookup: the source.
    """

    def __init__(self, target: Target, budget: int | str, lookup: DraftSource) -> None:
        super().__init__(target, budget)
        self.lookup = lookup

    def remember(self, row: Row) -> Any:
        return self.lookup.begin(row.ids)

    def propose(self, row: Row, memory: Any, depth: int, min_score: float) -> TokenTree:
        return TokenTree.of(row.ids[-1], self.lookup.propose(row.ids, memory, depth, self.max_candidates, min_score))

    def learn(self, row: Row, memory: Any, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        self.lookup.observe(row.ids, memory)


def max_candidates(budget: int | str, target: Target) -> int:
    """Most nodes of a tree under an option `budget`. Raises OptionError unless that is "auto" or 1 to `LARGEST`."""
    if budget == AUTO:
        return MOST.get(target.device.type, MOST["cuda"])
    fits = isinstance(budget, int) and 1 <= budget <= LARGEST
    require(fits, f"budget must be auto or at least 1 and at most {LARGEST}, not {budget}")
    return int(budget)


def reach(row: Row) -> int:
    """How deep a row wants its tree of deterministic tokens to be."""
    return row.policy.reach(row.room)
