"""Medusa (Cai et al., 2024): heads on the target's last hidden state draft several tokens ahead at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.clock import now
from paceline.drafters.medusa.formats import read_medusa
from paceline.drafters.medusa.forward import Guesses, MedusaForward
from paceline.drafters.medusa.head import RANKS, MedusaHead
from paceline.drafters.medusa.tree import Choice, Node, likeliest
from paceline.drafting.autoregressive import AutoregressiveDrafter, Step
from paceline.drafting.base import Row
from paceline.drafting.batch_budget import choose
from paceline.drafting.budget import AUTO, Budget
from paceline.drafting.heads import with_blocks
from paceline.drafting.tree import TokenTree
from paceline.drafting.tree_drafter import max_candidates
from paceline.errors import require
from paceline.targets.target import PassOutput, Target

CHAIN, STATIC, DYNAMIC = TREES = ("chain", "static", "dynamic")


@dataclass
class MedusaState:
    """A request's state.

    Attributes:
        hidden: the target's last hidden state at the token before the root, which the root was chosen from.
        budget: chooses how much of a tree is verified; None: that is fixed.
        length: tokens when it was last drafted for.
    """

    hidden: Float[Tensor, " hidden"]
    budget: Budget | None
    length: int = 0


class Medusa(AutoregressiveDrafter):
    """The target chose the root from a hidden state; head i guesses from the same one the token i places after the
    root. One small pass gives all guesses of a round, and none depends on another.

    Args:
        head: folder of Medusa heads, or (from Python) a `MedusaHead`, which is taken over; "auto": those trained on
            this machine for this model, or else those that are installed.
        k: blocks that each head must have, found or given; None: any number.
        tree: "chain": the likeliest token of each head, or one drawn from it where the output is sampled; "static":
            the same tree of ranks every round, built from the accuracies that training measured; "dynamic": the
            likeliest paths by what the heads themselves say. Trees are chosen, not drawn, even where the output is
            sampled.
        budget: most nodes of a tree; "auto": as many as pay on this machine.
        copy: whether chains copy from the request's text where it repeats itself (see `Copies`); "auto": under policies
            that say so, as `pace` does.
    """

    default_policy = "pace"
    source = "medusa"
    files = ("head",)

    def __init__(
        self,
        target: Target,
        *,
        head: str = AUTO,
        k: int | None = None,
        tree: str = CHAIN,
        budget: int | str = AUTO,
        copy: bool | str = "auto",
    ) -> None:
        super().__init__(target, copy=copy, chain=tree == CHAIN)
        require(tree in TREES, f"medusa: tree is {', '.join(TREES)}, not '{tree}'")
        require(k is None or k >= 1, f"medusa: heads have k = 1 block or more, not {k}")
        made, self.folder = MedusaHead.take(head, with_blocks(target, self.source), read_medusa, layers=k)
        self.auto, self.max_candidates = budget == AUTO, max_candidates(budget, target)
        self.tree, self.tokens, self.longest = tree, made.tokens, made.config.heads
        self.competes = tree != CHAIN
        self.reads_costs = self.auto and self.competes
        self.ranks = min(RANKS, made.config.vocab)
        self.accuracies = [ranks[: self.ranks] for ranks in made.config.accuracies]
        known = len(self.accuracies) == self.longest
        require(tree != STATIC or known, f"medusa: nobody measured the accuracies of these heads: use tree={DYNAMIC}")
        self.taps = (target.num_layers,)
        self.hidden_width = target.config.hidden_size
        self.forward = MedusaForward(made, target)
        self.static = cache(self._static)
        self._rows: Sequence[Row] = ()
        self._guesses: Guesses | None = None  # of this round, once they are asked for

    @property
    def kept_taps(self) -> tuple[int, ...]:
        """Empty: the last tokens are all that it looks at."""
        return ()

    def max_nodes(self, depth: int) -> int:
        # Copies may go on after the last head.
        return (depth if self.copy else min(depth, self.longest)) if self.tree == CHAIN else self.max_candidates

    def begin(self, row: Row, hidden: dict[int, Float[Tensor, "tokens hidden"]]) -> None:
        last = hidden[self.target.num_layers]
        # Of a prompt of one token, or one that another request has read, there is nothing: the draft is a blind guess.
        seen = last[-1] if len(last) else last.new_zeros(last.shape[1])
        row.state = MedusaState(seen, self.new_budget() if self.reads_costs else None)

    def observe(self, row: Row, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        state: MedusaState = row.state
        state.hidden = out.taps[self.target.num_layers][path[-1]]
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
            self._guesses = self.forward(torch.stack([row.state.hidden for row in self._rows]))
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
        for node in self._nodes(row, depth, min_score) if depth else ():
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

    def _nodes(self, row: Row, depth: int, min_score: float) -> list[Node]:
        scores, best = self.guesses.logits[row.slot, :depth].log_softmax(-1).topk(self.ranks)
        tokens = (best if self.tokens is None else self.tokens[best]).tolist()
        if self.tree == STATIC:
            nodes = (node for node in self.static(depth) if node.score > min_score)
            return [node._replace(token=tokens[node.depth - 1][node.token]) for node in nodes]
        chances = scores.exp().tolist()
        return likeliest(
            [list(map(Choice, *at)) for at in zip(chances, tokens, strict=True)], self.max_candidates, min_score
        )

    def _static(self, depth: int) -> list[Node]:
        """The tree of this depth, with ranks for tokens."""
        ranked = [map(Choice, ranks, range(self.ranks)) for ranks in self.accuracies[:depth]]
        return likeliest([sorted(choices, reverse=True) for choices in ranked], self.max_candidates)
