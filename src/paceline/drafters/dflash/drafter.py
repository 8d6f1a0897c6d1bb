"""DFlash (Chen, Liang and Liu, 2026): a small decoder fills in a block of tokens in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.drafters.dflash.formats import read_dflash
from paceline.drafters.dflash.forward import DFlashForward
from paceline.drafters.dflash.head import DFlashHead
from paceline.drafting.base import Row
from paceline.drafting.heads import with_blocks
from paceline.drafting.parallel import CHAIN, Guesses, ParallelDrafter, ParallelState
from paceline.drafting.tree import TokenTree
from paceline.errors import require
from paceline.registry import AUTO
from paceline.targets.cache import KVCache
from paceline.targets.target import PassOutput, Target

MOST = 64  # rounds that wait where drafting was not asked for


@dataclass(kw_only=True)
class DFlashState(ParallelState):
    """A request's state.

    Attributes:
        waiting: hidden states of the target that the head has not read, up to the token before the root, `[tokens,
            taps * hidden]` of each round.
    """

    waiting: list[Float[Tensor, "tokens read"]] = field(default_factory=list)


class DFlash(ParallelDrafter):
    """A small decoder sees the target's hidden states of the whole text as keys and values, and after the root a block
    of mask tokens. One pass over the block tells what stands in place of each; none depends on what is chosen for
    another.

    Args:
        head: folder of a DFlash head, or (from Python) a `DFlashHead`, which is taken over; "auto": the one trained
            last on this machine for this model, or else one that is installed.
        block: tokens of a block, the root included; at most as many as the head has learnt.
        tree: "chain": the likeliest token for each place, or one drawn where the output is sampled; "dynamic": the
            likeliest paths by what the head says of each place. Trees are chosen, not drawn, even where the output is
            sampled.
        budget: most nodes of a tree; "auto": as many as pay on this machine.
        copy: whether chains copy from the request's text where it repeats itself (see `Copies`); "auto": under policies
            that say so, as `pace` does.
    """

    source = "dflash"
    files = ("head",)

    def __init__(
        self,
        target: Target,
        *,
        head: str = AUTO,
        block: int | None = None,
        tree: str = CHAIN,
        budget: int | str = AUTO,
        copy: bool | str = AUTO,
    ) -> None:
        super().__init__(target, tree=tree, budget=budget, copy=copy)
        made, self.folder = DFlashHead.take(head, with_blocks(target, self.source), read_dflash)
        most = made.config.block
        require(block is None or 2 <= block <= most, f"dflash: this head's block has 2 .. {most} tokens, not {block}")
        self.tokens = made.tokens
        self.forward = DFlashForward(made, target, block or most)
        self.longest = self.forward.block - (not made.config.from_known)
        self._read = made.config.taps  # in the head's order
        self.taps = tuple(sorted(self._read))

    def start(self, cache: KVCache) -> None:
        self.forward.start(cache.batch, cache.capacity)

    @torch.inference_mode()
    def begin(self, row: Row, hidden: dict[int, Float[Tensor, "tokens hidden"]]) -> None:
        row.state = DFlashState(budget=self.new_budget(row) if self.reads_costs else None)
        self.forward.lengths[row.slot] = 0
        self.forward.read(row.slot, torch.cat([hidden[tap] for tap in self._read], -1))

    @torch.inference_mode()
    def observe(self, row: Row, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        # A copy: what the pass tapped has rows of all nodes, and of other requests.
        row.state.waiting.append(torch.cat([out.taps[tap][path] for tap in self._read], -1))
        if len(row.state.waiting) >= MOST:
            self._catch_up(row)
        super().observe(row, tree, path, out)

    def move(self, source: int, target: int) -> None:
        self.forward.move(source, target)

    @torch.inference_mode()
    def catch_up(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row.room > 0 and row.state.waiting:
                self._catch_up(row)

    def _catch_up(self, row: Row) -> None:
        self.forward.read(row.slot, torch.cat(row.state.waiting))
        row.state.waiting = []

    def guess(self, rows: Sequence[Row]) -> Guesses:
        self.catch_up(rows)
        return self.forward(rows)
