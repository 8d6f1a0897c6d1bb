"""Lookahead decoding (Fu et al., 2024): n-grams of the target's own Jacobi iterations, made and verified in a pass."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

from paceline.drafting.base import Drafter, Row
from paceline.drafting.budget import FADING, Budget
from paceline.drafting.tree import TokenTree
from paceline.drafting.tree_drafter import reach
from paceline.errors import require
from paceline.registry import AUTO
from paceline.targets.target import PassOutput, Target

LIKELY = 0.5  # that the next token of an n-gram is right; only where it starts from: the request shows more
HARVEST = 0.05  # tokens that a column brings, as the paper's settings do on chats
COLUMNS = 60  # that weigh as much as that


class Window:
    """One request's Jacobi window and n-gram pool, and what they have cost and brought.

    `levels[l][j]` is the guess of iteration l for the j-th token after the root: a column read downwards,
    with the target's answer at its end, is an n-gram that the target itself produced.
    """

    def __init__(self, ids: list[int], width: int, depth: int, pool: int, budget: Budget | None) -> None:
        # The paper starts from random tokens; those of the prompt are as good, and need no random numbers.
        fill = np.resize(np.array(ids, dtype=np.int64), width + depth).tolist()
        self.levels = [deque(fill[level : level + width]) for level in range(depth)]
        self.nodes: list[list[int]] = []  # where the last tree holds each guess, as [level][column]
        self.ngrams: dict[int, OrderedDict[tuple[int, ...], None]] = {}
        self.pool, self.budget = pool, budget
        self.length = 0  # tokens when it was last drafted for
        self.drafted = 0  # nodes of this round's tree
        self.columns, self.harvest = 0.0, 0.0  # drafted, and tokens accepted from the pool: fading

    def remember(self, ngram: tuple[int, ...]) -> None:
        """Keep the `pool` n-grams latest seen for each first token."""
        known = self.ngrams.setdefault(ngram[0], OrderedDict())
        known[ngram[1:]] = None
        known.move_to_end(ngram[1:])
        if len(known) > self.pool:
            known.popitem(last=False)


class Lookahead(Drafter):
    """The lookahead branch is a tree like any other: the first level is a chain of guesses below the root, and under
    its j-th token hang the later levels' guesses of column j, so that each sees what the paper's mask lets it see. The
    verification branch is the pool's n-grams that begin with the root. One pass answers both.

    Args:
        level: length of the n-grams (N).
        window: columns of the Jacobi window (W).
        guess: most n-grams verified a round (G), and kept for each first token.
        budget: most nodes of the tree, half of them for each branch, by which `window` and `guess` are cut; "auto": as
            many n-grams and columns as pay on this machine. A column pays later: it is held to bring what those before
            it brought.
    """

    reads_logits = True
    default_policy = "fixed:k=18"  # window + level - 2: the depth of the lookahead branch
    source = "lookahead"
    needs_trees = True

    def __init__(
        self, target: Target, *, level: int = 5, window: int = 15, guess: int = 15, budget: int | str = AUTO
    ) -> None:
        super().__init__(target)
        require(level >= 2, f"lookahead: level must be >= 2, not {level}")
        require(window >= 1 and guess >= 1, f"lookahead: window and guess must be >= 1, not {window} and {guess}")
        self.auto, self.level, self.window, self.guess = budget == AUTO, level, window, guess
        self.reads_costs = self.auto
        if not self.auto:
            least = 2 * (level - 1)
            require(
                isinstance(budget, int) and budget >= least,
                f"lookahead: budget must be auto or at least {least}, a column and an n-gram of {level}, not {budget}",
            )
            self.window = min(window, int(budget) // least)
            self.guess = min(guess, int(budget) // (level - 1) - self.window)

    def max_nodes(self, depth: int) -> int:
        return (self.level - 1) * (self.window + self.guess)

    def begin(self, row: Row, hidden: object) -> None:
        budget = self.new_budget(row) if self.auto else None
        row.state = Window(row.ids, self.window, self.level - 1, self.guess, budget)

    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        self.sharing = len(rows) + self.others
        return [self._branches(row, row.state, self.sharing) for row in rows]

    def _branches(self, row: Row, window: Window, rows: int) -> TokenTree:
        tree = TokenTree.root(row.ids[-1])
        window.nodes, window.length = [], len(row.ids)
        deep = min(reach(row), self.window + self.level - 2)
        if deep == 0:
            return tree
        for ngram in reversed(window.ngrams.get(row.ids[-1], ())):  # verification branch, latest first
            tree.add_path(ngram[:deep], self.source)
        columns = min(self.window, deep - (self.level - 2))  # whole ones: an n-gram needs its column's last answer
        if window.budget:
            tree.scores = [LIKELY**depth for depth in tree.depths]
            tree = window.budget.choose(tree, rows, slots=len(row.ids))
            tree.scores = [None] * len(tree)  # from here on it is a whole
            columns = self._paying(window, window.budget, columns, len(tree), rows)
        window.columns = window.columns * FADING + max(columns, 0)
        if columns > 0:
            self._lookahead_branch(tree, window, columns)
        window.drafted = tree.drafted
        return tree

    def _paying(self, window: Window, budget: Budget, most: int, others: int, rows: int) -> int:
        """How many columns bring more than they cost, beside `others` nodes."""
        brings = (HARVEST * COLUMNS + window.harvest) / (COLUMNS + window.columns)
        rate, costs = budget.rate(rows) / rows, budget.costs
        without = costs(rows * others)
        worth = [n * brings - rate * (costs(rows * (others + n * (self.level - 1))) - without) for n in range(most + 1)]
        return int(np.argmax(worth)) if worth else 0

    def _lookahead_branch(self, tree: TokenTree, window: Window, columns: int) -> None:
        for level, guesses in enumerate(window.levels):
            row: list[int] = []
            for column in range(columns):
                parent = window.nodes[-1][column] if level else row[-1] if row else 0
                row.append(tree.add(guesses[column], parent, self.source))
            window.nodes.append(row)

    def observe(self, row: Row, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        window: Window = row.state
        own, window.drafted = window.drafted, 0  # others' nodes, which come after its own, are not its harvest
        window.harvest = window.harvest * FADING + sum(0 < node <= own for node in path)
        if window.budget:
            window.budget.observe(row.ids[window.length :])
        shift = -len(path)  # the root moved on by so many places
        if window.nodes:
            self._learn(window, out.logits[window.nodes[-1]].argmax(-1).tolist())
            shift += 1  # levels that moved up stand one place further on already
        for guesses in window.levels:
            guesses.rotate(shift)

    @staticmethod
    def _learn(window: Window, answers: list[int]) -> None:
        for column, answer in enumerate(answers):
            window.remember((*(guesses[column] for guesses in window.levels), answer))
        # The next iteration: every level moves up, a step to the right, and the answers become the newest. That goes as
        # far as the target's token; the window slides on over the accepted ones, and old guesses fill the gap.
        newest = deque(window.levels[-1])
        for column, answer in enumerate(answers):
            newest[column] = answer
        window.levels = [*window.levels[1:], newest]
