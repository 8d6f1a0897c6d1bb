"""Drafters whose head drafts step by step, on states of its own: chains, and EAGLE-2's trees (Li et al., 2024)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from paceline.clock import now
from paceline.drafting.autoregressive import AutoregressiveDrafter, Step, Told
from paceline.drafting.base import Row
from paceline.drafting.batch_budget import choose
from paceline.drafting.budget import Budget
from paceline.drafting.stepping.forward import Guessed, SteppingForward
from paceline.drafting.stepping.tree import DynamicTree
from paceline.drafting.stepping.waiting import Waiting
from paceline.drafting.tree import TokenTree, last_nodes, tree_span
from paceline.drafting.tree_drafter import max_candidates
from paceline.errors import require
from paceline.policies.sureness import Sureness
from paceline.registry import AUTO
from paceline.targets.cache import KVCache
from paceline.targets.span import Span
from paceline.targets.target import PassOutput, Target

FADING = 0.1  # weight of the newest among measured seconds
TOLD = 8  # most of the likeliest tokens that are looked for one by one


@dataclass
class SteppingState:
    """A request's state.

    Attributes:
        waiting: see `SteppingForward`.
        budget: chooses how much of a tree is verified; None: that is fixed.
        length: tokens when it was last drafted for.
        read: how many nodes of this round's chain the layers that are shared have run over, the first ones.
    """

    waiting: Waiting
    budget: Budget | None
    length: int = 0
    read: int = 0


class SteppingDrafter(AutoregressiveDrafter):
    """A drafter whose head drafts from states of its own. Subclasses make the head, and call `draft_by` with it.

    Args:
        tree: 1: a chain. Above: the likeliest `tree` nodes of each level are drafted from, and the likeliest `tree`
            tokens after each are candidates; chosen, not drawn, even where the output is sampled.
        budget: most nodes of a tree, the likeliest candidates of all levels; "auto": as many as pay on this machine.
        copy: see `AutoregressiveDrafter`.
    """

    default_policy = "pace"

    def __init__(self, target: Target, tree: int, budget: int | str, copy: bool | str) -> None:
        super().__init__(target, copy=copy, chain=tree == 1)
        require(tree >= 1, f"{self.source}: tree must be >= 1, not {tree}")
        self.tree = tree
        self.auto, self.max_candidates = budget == AUTO, max_candidates(budget, target)

    def draft_by(self, forward: SteppingForward, tokens: Int[Tensor, " tokens"] | None = None) -> None:
        """With this head, which can draft these tokens; None: all."""
        self.forward, self.taps, self.tokens = forward, forward.taps, tokens
        self._ids = None if tokens is None else tokens.tolist()
        self.tree = min(self.tree, len(self._ids or range(self.target.vocab_size)))
        self.competes = self.tree > 1
        self.reads_costs = self.auto and self.competes
        self.hidden_width = self.target.config.hidden_size if self.target.has_blocks else None
        self._states: Tensor  # guessed at the nodes that were drafted from last
        self._seconds = 0.0  # of a row's level of a tree, below the first: fading mean

    @property
    def ranks_all(self) -> bool:
        """Whether what a step ranks are all tokens that can be drafted."""
        return True

    @property
    def kept_taps(self) -> tuple[int, ...]:
        """Empty: the last tokens are all that it looks at."""
        return ()

    def max_nodes(self, depth: int) -> int:
        # The head's own cache is as large as the target's, and keeps all nodes that it drafts from.
        return depth if self.tree == 1 else max(self.max_candidates, self.tree * depth)

    def start(self, cache: KVCache) -> None:
        self.forward.start(cache.batch, cache.capacity)

    def begin(self, row: Row, hidden: dict[int, Float[Tensor, "tokens hidden"]]) -> None:
        budget = self.new_budget(row) if self.reads_costs else None
        most = self.forward.most
        count = min(most, *(len(hidden[tap]) for tap in self.taps))  # of some, others may keep more than the last ones
        last = {tap: hidden[tap][len(hidden[tap]) - count :].clone() for tap in self.taps}
        row.state = SteppingState(Waiting(self.taps, last, most), budget)
        self.forward.begin(row)

    def observe(self, row: Row, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        state: SteppingState = row.state
        state.waiting.add(out.taps, path)
        if state.budget:
            state.budget.observe(row.ids[state.length :])

    def move(self, source: int, target: int) -> None:
        self.forward.cache.move(source, target)

    # -- drafting --------------------------------------------------------------------------------------------------
    @torch.inference_mode()
    def catch_up(self, rows: Sequence[Row]) -> None:
        self.forward.catch_up(rows)

    @torch.inference_mode()
    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        return super().draft(rows) if self.tree == 1 else self._draft_trees(rows)

    def own_states(self, rows: int, span: Callable[[np.ndarray], Span]) -> Float[Tensor, "batch width hidden"] | None:
        """The tokens' own states, of a head that reads these, at nodes of the trees; None: it reads embeddings.

        Args:
            span: the nodes, in a cache in which the rows' trees begin there.
        """
        return None

    def step(self, rows: Sequence[Row], trees: Sequence[TokenTree], depth: int) -> Step:
        device = self.target.device

        def nodes(starts: np.ndarray) -> Span:
            return last_nodes(trees, starts, depth, device)

        tokens = self.own_states(len(rows), nodes)
        if depth == 0:
            made = self.forward.roots(rows, tokens)
        else:
            made = self.forward.nodes(self._states, nodes(self.forward.starts(len(rows))), tokens)
        self._states = made.states
        return Step(self.logits(made)[:, 0], made.states[:, 0], self._told(made))

    def _told(self, made: Guessed) -> list[Told] | None:
        if made.ranked is None or not self.ranks_all:
            return None
        found = zip(*(some[:, 0].tolist() for some in made.ranked[1:]), strict=True)
        return [Told(self._named(at), Sureness(exp(logp), entropy)) for (at, *_), (logp, *_), entropy in found]

    def _named(self, at: int) -> int:
        return self._ids[at] if self._ids else at

    def logits(self, made: Guessed) -> Float[Tensor, "batch width tokens"]:
        """Of the tokens of the rows' vocabularies."""
        return made.logits

    def _draft_trees(self, rows: Sequence[Row]) -> list[TokenTree]:
        trees = [DynamicTree(row.ids[-1], self.tree, self.max_candidates) for row in rows]
        self.sharing, started = len(rows) + self.others, now()
        growing = [row for row in rows if row.room > 0 and row.policy.more(0)]
        depth, first = 0, 0
        while growing:
            began = now()
            # All rows go on by as many nodes at a time: those of a row that stopped are padding.
            stop = first + len(trees[growing[0].slot].newest)
            made = self._expand(rows, trees, first, stop)
            self._states = made.states
            growing = [row for row in growing if self._grow(row, trees[row.slot], made, depth)]
            if depth:
                seconds = (now() - began) / len(rows)
                self._seconds += FADING * (seconds - self._seconds) if self._seconds else seconds
            depth, first = depth + 1, stop
        self.forwards = depth
        return self._chosen(rows, [tree.tree(self.source) for tree in trees], now() - started)

    def _expand(self, rows: Sequence[Row], trees: Sequence[DynamicTree], first: int, stop: int) -> Guessed:
        """What is guessed at the newest nodes, which are `first .. stop-1` in each tree that grows."""
        expanded = [tree.expanded for tree in trees]
        device = self.target.device

        def newest(starts: np.ndarray) -> Span:
            return tree_span(expanded, starts, device).part(first, stop)

        tokens = self.own_states(len(rows), newest)
        if first == 0:
            return self.forward.roots(rows, tokens)
        width = stop - first
        origins = [tree.origins if len(tree.origins) == width else [0] * width for tree in trees]
        read = self._states[torch.arange(len(rows))[:, None], origins]
        return self.forward.nodes(read, newest(self.forward.starts(len(rows))), tokens)

    def _grow(self, row: Row, tree: DynamicTree, made: Guessed, depth: int) -> bool:
        """Add a level of candidates unless the policy stops; True if the row wants yet another."""
        hidden = made.states[row.slot, 0] if row.policy.reads_hidden else None
        if not self.keeps(row, self._best_q(row, tree, made) if row.policy.reads_q else None, depth, hidden):
            return False
        tree.propose(*self._likeliest(row, made))
        budget: Budget | None = row.state.budget
        if depth + 1 == row.room or not row.policy.more(depth + 1):
            return False
        return tree.descend(budget.min_score(self.sharing, self._seconds) if budget else 0.0)

    def _best_q(self, row: Row, tree: DynamicTree, made: Guessed) -> Float[Tensor, " tokens"]:
        """The distribution after the likeliest of the newest nodes."""
        path = [tree.expanded.tokens[node] for node in tree.expanded.path(tree.newest[0])[1:]]
        return self.distribution(row, self.own(row, self.logits(made)[row.slot, 0]), path)

    def _likeliest(self, row: Row, made: Guessed) -> tuple[list[list[int]], list[list[float]]]:
        """`tree` tokens after each of the newest nodes, and their log-probabilities."""
        if made.ranked and self.ranks_all and self.tree <= TOLD:
            found = made.ranked.likeliest[row.slot].tolist()
            return [[self._named(at) for at in some] for some in found], made.ranked.logps[row.slot].tolist()
        logps, at = self.own(row, self.logits(made)[row.slot]).log_softmax(-1).topk(self.tree)
        tokens = self.vocabulary(row)
        return (at if tokens is None else tokens[at]).tolist(), logps.tolist()

    def _chosen(self, rows: Sequence[Row], trees: Sequence[TokenTree], seconds: float) -> list[TokenTree]:
        for row in rows:
            row.state.length = len(row.ids)
        return choose(
            [row.state.budget for row in rows], trees, [row.state.length for row in rows], self.sharing, seconds
        )
