"""Drafters whose one forward guesses several tokens ahead, where no guess depends on what is chosen for another."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.clock import now
from paceline.drafting.autoregressive import AutoregressiveDrafter, Step
from paceline.drafting.base import Row
from paceline.drafting.batch_budget import choose
from paceline.drafting.budget import Budget
from paceline.drafting.likeliest_paths import Choice, Node, likeliest
from paceline.drafting.tree import TokenTree
from paceline.drafting.tree_drafter import max_candidates
from paceline.errors import require
from paceline.registry import AUTO
from paceline.targets.target import PassOutput, Target

CHAIN, DYNAMIC = "chain", "dynamic"
RANKS = 10  # of the choices for a place, how many may stand in a tree


class Guesses(NamedTuple):
    states: Float[Tensor, "batch places hidden"]  # what the logits come of
    logits: Float[Tensor, "batch places vocab"]


@dataclass(kw_only=True)
class ParallelState:
    """A request's state.

    Attributes:
        budget: chooses how much of a tree is verified; None: that is fixed.
        length: tokens when it was last drafted for.
    """

    budget: Budget | None
    length: int = 0


class ParallelDrafter(AutoregressiveDrafter):
    """A drafter that guesses several tokens ahead in one forward. Subclasses set `longest`, how many, and say what the
    forward is.

    Args:
        tree: "chain": the likeliest token for each place, or one drawn where the output is sampled; "dynamic": the
            likeliest paths, each as likely as its tokens multiplied. Trees are chosen, not drawn, even where the output
            is sampled.
        budget: most nodes of a tree; "auto": as many as pay on this machine.
        copy: whether chains copy; see `AutoregressiveDrafter`.
    """

    default_policy = "pace"
    #: Kinds of trees that it drafts.
    trees: tuple[str, ...] = (CHAIN, DYNAMIC)

    def __init__(self, target: Target, *, tree: str, budget: int | str, copy: bool | str) -> None:
        super().__init__(target, copy=copy, chain=tree == CHAIN)
        require(tree in self.trees, f"{self.source}: tree is {', '.join(self.trees)}, not '{tree}'")
        self.tree, self.auto, self.max_candidates = tree, budget == AUTO, max_candidates(budget, target)
        self.competes = tree != CHAIN
        self.reads_costs = self.auto and self.competes
        self.hidden_width = target.config.hidden_size
        self._rows: Sequence[Row] = ()
        self._guesses: Guesses | None = None  # of this round, once they are asked for

    @abstractmethod
    def guess(self, rows: Sequence[Row]) -> Guesses:
        """What comes after each row's last token, for the next `longest` places."""

    def max_nodes(self, depth: int) -> int:
        # Copies may go on after the last guess.
        return (depth if self.copy else min(depth, self.longest)) if self.tree == CHAIN else self.max_candidates

    def observe(self, row: Row, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        state: ParallelState = row.state
        if state.budget:
            state.budget.observe(row.ids[state.length :])

    # -- drafting --------------------------------------------------------------------------------------------------
    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        self._rows, self._guesses = rows, None
        trees = super().draft(rows) if self.tree == CHAIN else self._draft_trees(rows)
        # One forward tells all levels: of what was drafted, or of the first token, which was left out.
        self.forwards = 0 if self._guesses is None else max(1, *(tree.depth for tree in trees))
        return trees

    @property
    def guesses(self) -> Guesses:
        """Of all rows, computed when the first of them wants a draft."""
        if self._guesses is None:
            self._guesses = self.guess(self._rows)
        return self._guesses

    def step(self, rows: Sequence[Row], trees: Sequence[TokenTree], depth: int) -> Step:
        return Step(self.guesses.logits[:, depth], self.guesses.states[:, depth])

    @torch.inference_mode()
    def _draft_trees(self, rows: Sequence[Row]) -> list[TokenTree]:
        self.sharing, started = len(rows) + self.others, now()
        depths = [self._reach(row) for row in rows]
        trees = [self._grow(row, depth) for row, depth in zip(rows, depths, strict=True)]
        budgets = [row.state.budget if depth else None for row, depth in zip(rows, depths, strict=True)]
        return choose(budgets, trees, [row.state.length for row in rows], self.sharing, now() - started)

    def _grow(self, row: Row, depth: int) -> TokenTree:
        state, tree = row.state, TokenTree.root(row.ids[-1])
        state.length = len(row.ids)
        min_score = state.budget.min_score(self.sharing) if state.budget else 0.0
        for node in self.nodes(row, depth, min_score) if depth else ():
            tree.add(node.token, node.parent, self.source, score=node.score)
        return tree

    def _reach(self, row: Row) -> int:
        """How deep a row wants its tree, judged by the likeliest path."""
        depth, drafted = 0, list[int]()
        while depth < min(row.room, self.longest) and row.policy.more(depth):
            logits, hidden = self.guesses.logits[row.slot, depth], self.guesses.states[row.slot, depth]
            q = self.distribution(row, logits, drafted) if row.policy.reads_q else None
            if not self.keeps(row, q, depth, hidden):
                break
            if row.policy.reads_q:
                drafted.append(self.best(row, logits))
            depth += 1
        return depth

    def nodes(self, row: Row, depth: int, min_score: float) -> list[Node]:
        """The nodes of a row's tree, none of which scores `min_score` or less."""
        chances, tokens = self.ranked(row, depth)
        choices = [list(map(Choice, *place)) for place in zip(chances, tokens, strict=True)]
        return likeliest(choices, self.max_candidates, min_score)

    def ranked(self, row: Row, depth: int) -> tuple[list[list[float]], list[list[int]]]:
        """For each of `depth` places the likeliest tokens' chances, and the tokens."""
        logits = self.guesses.logits[row.slot, :depth]
        scores, best = logits.log_softmax(-1).topk(min(RANKS, logits.shape[-1]))
        return scores.exp().tolist(), (best if self.tokens is None else self.tokens[best]).tolist()
