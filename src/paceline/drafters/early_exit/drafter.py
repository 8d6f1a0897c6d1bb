"""Early exit (EESD, Liu et al., 2024, section 3.1): the target's first layers and a small trained head draft."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.drafters.early_exit.beam import Beam
from paceline.drafters.early_exit.exit import Exit
from paceline.drafters.early_exit.head import ExitHead
from paceline.drafting.autoregressive import AutoregressiveDrafter, Step
from paceline.drafting.base import Row
from paceline.drafting.heads import with_blocks
from paceline.drafting.shared_layers import SharedLayers
from paceline.drafting.tree import TokenTree, last_nodes, tree_span
from paceline.errors import require
from paceline.registry import AUTO
from paceline.targets.cache import KVCache
from paceline.targets.span import Span
from paceline.targets.target import PassOutput, Target


class EarlyExit(AutoregressiveDrafter):
    """The first N layers run over a token when it is drafted from, and the target's pass goes on from there
    (`SharedLayers`).

    Args:
        head: folder of the exit head, or (from Python) an `ExitHead`, which is taken over; "auto": the one trained on
            this machine for this model, or else the one that is installed.
        tree: 1: a chain. Above: a tree of the `tree` likeliest tokens after each of the `tree` likeliest nodes of a
            level; chosen, not drawn, even where the output is sampled.
        nodes: most nodes of a tree.
        copy: whether chains copy from the request's text where it repeats itself (see `Copies`); "auto": under policies
            that say so, as `pace` does.
    """

    default_policy = "pace"
    source = "early-exit"
    files = ("head",)
    shares_cache = True

    def __init__(
        self, target: Target, *, head: str = AUTO, tree: int = 1, nodes: int = 16, copy: bool | str = AUTO
    ) -> None:
        super().__init__(target, copy=copy, chain=tree == 1)
        require(tree >= 1, f"early-exit: tree must be >= 1, not {tree}")
        require(nodes >= 1, f"early-exit: nodes must be >= 1, not {nodes}")
        made, self.folder = ExitHead.take(head, with_blocks(target, self.source))
        self.layers, self.tokens = made.config.start, made.tokens
        self.tree, self.nodes = min(tree, made.config.vocab), nodes
        self.taps = (self.layers,)
        self.hidden_width = target.config.hidden_size
        self.exit, self.shared_layers = Exit(made, target), SharedLayers(target, self.layers)

    def max_nodes(self, depth: int) -> int:
        return depth if self.tree == 1 else self.nodes

    def start(self, cache: KVCache) -> None:
        self.shared_layers.start(cache)
        self.exit.start(cache.batch, cache.capacity)

    def begin(self, row: Row, hidden: dict[int, Float[Tensor, "tokens hidden"]]) -> None:
        self.exit.begin(row, hidden[self.layers])

    def move(self, source: int, target: int) -> None:
        self.exit.cache.move(source, target)

    # -- drafting --------------------------------------------------------------------------------------------------
    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        self.shared_layers.begin_round()
        trees = super().draft(rows) if self.tree == 1 else self._draft_trees(rows)
        for row, tree in zip(rows, trees, strict=True):
            row.state.read = min(self.shared_layers.nodes, len(tree))
        return trees

    def step(self, rows: Sequence[Row], trees: Sequence[TokenTree], depth: int) -> Step:
        span = last_nodes(trees, self.shared_layers.starts(len(rows)), depth, self.target.device)
        hidden = self._exit(rows, span)
        return Step(self.exit.logits(hidden)[:, 0], hidden[:, 0])

    @torch.inference_mode()
    def _draft_trees(self, rows: Sequence[Row]) -> list[TokenTree]:
        self.sharing = len(rows) + self.others
        beams = [Beam(row.ids[-1], self.tree, self.nodes, self.source) for row in rows]
        trees = [beam.tree for beam in beams]
        growing = [row for row in rows if row.room > 0 and row.policy.more(0)]
        depth, at = 0, 0
        while growing:
            # All rows go on by as many nodes at a time: those of a row that stopped are its leaves, then padding.
            stop = at + len(beams[growing[0].slot].newest)
            span = tree_span(trees, self.shared_layers.starts(len(rows)), self.target.device)
            hidden = self._exit(rows, span.part(at, stop))
            logits = self.exit.logits(hidden)
            growing = [row for row in growing if self._grow(row, beams[row.slot], logits[row.slot], hidden, depth)]
            depth, at = depth + 1, stop
        self.forwards = depth
        return trees

    def _grow(self, row: Row, beam: Beam, logits: Float[Tensor, "width tokens"], hidden: Tensor, depth: int) -> bool:
        """Add a level to a row's tree unless the policy stops; True if the row wants yet another."""
        path = [beam.tree.tokens[node] for node in beam.tree.path(beam.newest[0])[1:]]
        q = self.distribution(row, logits[0], path) if row.policy.reads_q else None
        keep = self.keeps(row, q, depth, hidden[row.slot, 0])
        if keep:
            scores, best = logits.log_softmax(-1).topk(self.tree)
            beam.propose((best if self.tokens is None else self.tokens[best]).tolist(), scores.tolist())
        if keep and beam.has_room and depth + 1 < row.room and row.policy.more(depth + 1):
            beam.descend()
            return True
        beam.finish()
        return False

    def _exit(self, rows: Sequence[Row], span: Span) -> Float[Tensor, "batch width hidden"]:
        """The first N layers and those of the exit head over nodes of the trees."""
        hidden = self.shared_layers.run(span)
        return self.exit.nodes(hidden, span) if span.offset else self.exit.root(rows, hidden)

    # -- verification ----------------------------------------------------------------------------------------------
    def enter(
        self, rows: Sequence[Row], trees: Sequence[TokenTree], span: Span, cache: KVCache
    ) -> tuple[int, Float[Tensor, "batch width hidden"] | None]:
        return self.shared_layers.resume([row.state.read for row in rows], trees, span, cache)

    def observe(self, row: Row, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        self.exit.commit(row, path, out.taps[self.layers])
