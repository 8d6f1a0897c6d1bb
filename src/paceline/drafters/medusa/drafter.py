"""Medusa (Cai et al., 2024): heads on the target's last hidden state draft several tokens ahead at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.drafters.medusa.formats import read_medusa
from paceline.drafters.medusa.forward import MedusaForward
from paceline.drafters.medusa.head import MedusaHead
from paceline.drafting.base import Row
from paceline.drafting.heads import with_blocks
from paceline.drafting.likeliest_paths import Choice, Node, likeliest
from paceline.drafting.parallel import CHAIN, DYNAMIC, RANKS, Guesses, ParallelDrafter, ParallelState
from paceline.drafting.tree import TokenTree
from paceline.errors import require
from paceline.registry import AUTO
from paceline.targets.target import PassOutput, Target

STATIC = "static"


@dataclass(kw_only=True)
class MedusaState(ParallelState):
    """A request's state.

    Attributes:
        hidden: the target's last hidden state at the token before the root, which the root was chosen from.
    """

    hidden: Float[Tensor, " hidden"]


class Medusa(ParallelDrafter):
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

    source = "medusa"
    files = ("head",)
    trees = (CHAIN, STATIC, DYNAMIC)

    def __init__(
        self,
        target: Target,
        *,
        head: str = AUTO,
        k: int | None = None,
        tree: str = CHAIN,
        budget: int | str = AUTO,
        copy: bool | str = AUTO,
    ) -> None:
        super().__init__(target, tree=tree, budget=budget, copy=copy)
        require(k is None or k >= 1, f"medusa: heads have k = 1 block or more, not {k}")
        made, self.folder = MedusaHead.take(head, with_blocks(target, self.source), read_medusa, layers=k)
        self.tokens, self.longest = made.tokens, made.config.heads
        self.accuracies = [ranks[: min(RANKS, made.config.vocab)] for ranks in made.config.accuracies]
        known = len(self.accuracies) == self.longest
        require(tree != STATIC or known, f"medusa: nobody measured the accuracies of these heads: use tree={DYNAMIC}")
        self.taps = (target.num_layers,)
        self.forward = MedusaForward(made, target)
        self.static = cache(self._static)

    @property
    def kept_taps(self) -> tuple[int, ...]:
        """Empty: the last tokens are all that it looks at."""
        return ()

    def begin(self, row: Row, hidden: dict[int, Float[Tensor, "tokens hidden"]]) -> None:
        last = hidden[self.target.num_layers]
        # Of a prompt of one token, or one that another request has read, there is nothing: the draft is a blind guess.
        seen = last[-1] if len(last) else last.new_zeros(last.shape[1])
        row.state = MedusaState(hidden=seen, budget=self.new_budget(row) if self.reads_costs else None)

    def observe(self, row: Row, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        row.state.hidden = out.taps[self.target.num_layers][path[-1]]
        super().observe(row, tree, path, out)

    def guess(self, rows: Sequence[Row]) -> Guesses:
        return self.forward(torch.stack([row.state.hidden for row in rows]))

    def nodes(self, row: Row, depth: int, min_score: float) -> list[Node]:
        if self.tree != STATIC:
            return super().nodes(row, depth, min_score)
        _, tokens = self.ranked(row, depth)
        nodes = (node for node in self.static(depth) if node.score > min_score)
        return [node._replace(token=tokens[node.depth - 1][node.token]) for node in nodes]

    def _static(self, depth: int) -> list[Node]:
        """The tree of this depth, with ranks for tokens."""
        ranked = [map(Choice, ranks, range(len(ranks))) for ranks in self.accuracies[:depth]]
        return likeliest([sorted(choices, reverse=True) for choices in ranked], self.max_candidates)
