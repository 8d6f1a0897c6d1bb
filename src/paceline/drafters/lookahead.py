"""Lookahead decoding (Fu et al., 2024): n-grams of the target's own Jacobi iterations, made and verified in a pass."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

from paceline.drafters.base import Drafter, Row
from paceline.drafters.tree import TokenTree
from paceline.registry import require
from paceline.targets.target import PassOutput, Target


class Window:
    """One request's Jacobi window and n-gram pool.

    `levels[l][j]` is the guess of iteration l for the j-th token after the root: a column read downwards,
    with the target's answer at its end, is an n-gram that the target itself produced.
    """

    def __init__(self, ids: list[int], width: int, depth: int, pool: int) -> None:
        # The paper starts from random tokens; those of the prompt are as good, and need no random numbers.
        fill = np.resize(np.array(ids, dtype=np.int64), width + depth).tolist()
        self.levels = [deque(fill[level : level + width]) for level in range(depth)]
        self.nodes: list[list[int]] = []  # where the last tree holds each guess, as [level][column]
        self.ngrams: dict[int, OrderedDict[tuple[int, ...], None]] = {}
        self.pool = pool

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
    """

    default_policy = "fixed:k=18"  # window + level - 2: the depth of the lookahead branch
    source = "lookahead"

    def __init__(self, target: Target, *, level: int = 5, window: int = 15, guess: int = 15) -> None:
        super().__init__(target)
        require(level >= 2, f"lookahead: level must be >= 2, not {level}")
        require(window >= 1 and guess >= 1, f"lookahead: window and guess must be >= 1, not {window} and {guess}")
        self.level, self.window, self.guess = level, window, guess

    def max_nodes(self, depth: int) -> int:
        return (self.level - 1) * (self.window + self.guess)

    def begin(self, row: Row, hidden: object) -> None:
        row.state = Window(row.ids, self.window, self.level - 1, self.guess)

    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        return [self._branches(row, row.state) for row in rows]

    def _branches(self, row: Row, window: Window) -> TokenTree:
        tree = TokenTree.root(row.ids[-1])
        window.nodes = []
        reach = min(row.room, self._reach(row))
        if reach == 0:
            return tree
        for ngram in reversed(window.ngrams.get(row.ids[-1], ())):  # verification branch, latest first
            tree.add_path(ngram[:reach], self.source)
        columns = min(self.window, reach - (self.level - 2))  # whole ones: an n-gram needs its column's last answer
        if columns > 0:
            self._lookahead_branch(tree, window, columns)
        return tree

    def _lookahead_branch(self, tree: TokenTree, window: Window, columns: int) -> None:
        for level, guesses in enumerate(window.levels):
            row: list[int] = []
            for column in range(columns):
                parent = window.nodes[-1][column] if level else row[-1] if row else 0
                row.append(tree.add(guesses[column], parent, self.source))
            window.nodes.append(row)

    def _reach(self, row: Row) -> int:
        depth = 0
        while depth < self.window + self.level - 2 and row.policy.more(depth):
            depth += 1
        return depth

    def observe(self, row: Row, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        window: Window = row.state
        if not window.nodes:
            return
        answers = out.logits[window.nodes[-1]].argmax(-1).tolist()
        for column, answer in enumerate(answers):
            window.remember((*(guesses[column] for guesses in window.levels), answer))
        # The next iteration: every level moves up, a step to the right, and the answers become the newest. That goes as
        # far as the target's token; the window slides on over the accepted ones, and old guesses fill the gap.
        newest = deque(window.levels[-1])
        for column, answer in enumerate(answers):
            newest[column] = answer
        window.levels = [*window.levels[1:], newest]
        for guesses in window.levels:
            guesses.rotate(1 - len(path))
