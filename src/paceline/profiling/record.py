"""Recording a trace: a target reads known texts, and every source says at each position what it would draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.clock import now
from paceline.decoding.engine import Engine
from paceline.decoding.request import Request
from paceline.drafters.merge import Merge
from paceline.drafting.base import Drafter, Row
from paceline.drafting.pause import Pause
from paceline.drafting.row_view import RowView
from paceline.drafting.tree import TokenTree
from paceline.drafting.tree_drafter import TreeDrafter
from paceline.errors import OptionError
from paceline.policies.base import StoppingPolicy
from paceline.policies.fixed import Fixed
from paceline.profiling.trace import FREE, SCORED, TOP, WHOLE, Source, TracedDraft, TracedText

if TYPE_CHECKING:
    from paceline.targets.cache import KVCache
    from paceline.targets.target import PassOutput

DEPTH = 10  # most tokens of a draft
NODES = 64  # and nodes of a tree
LEAST = 1e-3  # score of a node worth recording


class Listener(StoppingPolicy):
    """Wants every draft at its longest, and notes what it is shown and when."""

    reads_q = True

    def __init__(self) -> None:
        self.limit = DEPTH
        self.beliefs: list[list[float]] = []
        self.levels: list[float] = []
        self._since = 0.0

    def begin(self) -> None:
        self.beliefs, self.levels, self._since = [], [], now()

    def keep(self, q: Float[Tensor, " vocab"] | None, depth: int, hidden: Tensor | None = None) -> bool:
        self.levels.append(now() - self._since)
        if q is not None:
            top = q.topk(min(TOP, len(q))).values.tolist()
            self.beliefs.append([round(p, 5) for p in (*top, float(torch.special.entr(q).sum()))])
        self._since = now()
        return True

    def finish(self) -> None:
        """The draft is made: what came after its last level belongs to that."""
        if self.levels:
            self.levels[-1] += now() - self._since


class Heard:
    """One source, and what was heard of it."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.free = drafter, isinstance(drafter, TreeDrafter)
        self.nodes = drafter.max_nodes(DEPTH)
        if drafter.competes:  # one that grows trees, from scores: a smaller one is part of a larger one
            grower: Any = drafter
            self.nodes, grower.max_candidates = grower.max_candidates, NODES
        self.drafts: list[TracedDraft] = []
        self.levels: list[list[float]] = []
        self.observed: list[float] = []

    def begin(self, view: Any, hidden: dict[int, Tensor]) -> None:
        self.drafter.begin(view, hidden)
        if not self.free and hasattr(view.state, "budget"):
            view.state.budget = None  # all of a tree is wanted

    def draft(self, view: Any) -> None:
        listener: Listener = view.policy
        listener.begin()
        if isinstance(self.drafter, TreeDrafter):
            self.drafter.pause = Pause()  # a new one never pauses
        began = now()
        [tree] = self.drafter.draft([view])
        if isinstance(self.drafter, TreeDrafter):  # it drafted what its budget pays for: that was for the clock
            self.levels.append([now() - began])
            depth = min(DEPTH, view.room)
            tree = self.drafter.propose(view, view.state.memory, depth, LEAST) if depth else tree
            self.drafts.append(TracedDraft.of(tree))
            return
        listener.finish()
        self.levels.append(listener.levels)
        scores = [1.0 if score is None else score for score in tree.scores]
        likely = [node for node in range(1, len(tree)) if scores[node] >= LEAST]
        self.drafts.append(TracedDraft.of(tree.keep(likely), listener.beliefs))

    def observe(self, view: Any, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        before = now()
        self.drafter.observe(view, tree, path, out)
        self.observed.append(now() - before)

    def source(self, pass_share: float) -> Source:
        kind = FREE if self.free else SCORED if self.drafter.competes else WHOLE
        by_level = [[levels[at] for levels in self.levels if at < len(levels)] for at in range(DEPTH)]
        return Source(
            self.drafter.source,
            kind,
            self.nodes,
            self.drafter.default_policy,
            [median(seconds) for seconds in by_level if seconds],
            median(self.observed),
            pass_share,
            [str(folder.absolute()) for folder in self.drafter.predictors],
        )


class TraceRecorder(Drafter):
    """Asks all sources each round, and drafts nothing, so that the next round is one token further."""

    source = "recorder"

    def __init__(self, heard: Sequence[Heard]) -> None:
        super().__init__(heard[0].drafter.target)
        self.heard = heard
        self.taps = tuple({tap for one in heard for tap in one.drafter.taps})

    def max_nodes(self, depth: int) -> int:
        return max(one.drafter.max_nodes(depth) for one in self.heard)

    def start(self, cache: KVCache) -> None:
        for one in self.heard:
            one.drafter.start(cache)

    def begin(self, row: Row, hidden: dict[int, Tensor]) -> None:
        row.state = [RowView(row, Listener()) for _ in self.heard]
        for one, view in zip(self.heard, row.state, strict=True):
            one.begin(view, hidden)

    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        [row] = rows
        for one, view in zip(self.heard, row.state, strict=True):
            one.draft(view)
        return [TokenTree.root(row.ids[-1])]

    def observe(self, row: Row, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        for one, view in zip(self.heard, row.state, strict=True):
            one.observe(view, tree, path, out)

    def end(self, row: Row) -> None:
        for one, view in zip(self.heard, row.state, strict=True):
            one.drafter.end(view)


def sources_of(drafters: Mapping[str, Drafter]) -> tuple[dict[str, Drafter], dict[str, list[str]]]:
    """The sources that drafters are made of, and which: themselves, or what a merge merges.

    Raises:
        OptionError: for one whose drafts depend on what was drafted before.
    """
    sources: dict[str, Drafter] = {}
    parts: dict[str, list[str]] = {}
    own: dict[str, Drafter]
    for name, drafter in drafters.items():
        if isinstance(drafter, Merge):
            own = {}
            for part in drafter.parts:
                kind = f"{name}/{part.source}"
                alike = sum(other.source == part.source for other in own.values())  # with other options
                own[f"{kind}-{alike + 1}" if alike else kind] = part
            parts[name] = list(own)
        else:
            own = {name: drafter}
        for drafts in own.values():
            if drafts.needs_trees:
                raise OptionError(f"{drafts.source} learns from the branches of its own drafts: it cannot be traced")
        sources |= own
    return sources, parts


def record(
    sources: Mapping[str, Drafter], texts: Sequence[TracedText], shares: Mapping[str, float]
) -> dict[str, Source]:
    """Add to the texts what each source would draft at every position; returns the sources with what they take.

    Args:
        sources: by name, of one target, used for nothing else.
        shares: by name, where the target's pass after drafts of the source is not a whole one.
    """
    heard = {name: Heard(drafter) for name, drafter in sources.items()}
    if not heard:
        return {}
    recorder = TraceRecorder(list(heard.values()))
    engine = Engine(recorder.target, recorder)
    for text in texts:
        request = Request(text.prompt, limit=len(text.output), policy=Fixed(k=DEPTH), script=text.output)
        for _ in engine.run([request]):
            pass
        for name, one in heard.items():
            text.drafts[name], one.drafts = one.drafts, []
    return {name: one.source(shares.get(name, 1.0)) for name, one in heard.items()}
