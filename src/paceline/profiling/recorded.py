"""What stands in a replay for the target and for the sources of drafts: they say what was recorded, under a made-up
clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.drafting.base import Drafter, Row
from paceline.drafting.tree import TokenTree
from paceline.drafting.tree_drafter import TreeDrafter
from paceline.errors import DataError
from paceline.profiling.trace import SCORED, Source, Trace, TracedDraft
from paceline.registry import AUTO
from paceline.targets.cache import CacheShape, KVCache
from paceline.targets.context import ENDLESS
from paceline.targets.turns import Turns

if TYPE_CHECKING:
    from paceline.clock import MadeUpClock
    from paceline.drafting.budget import Budget
    from paceline.targets.cost_model import Costs

MOST_TAIL = 1 << 15  # tokens of a distribution after its largest


class RecordedTarget:
    """Computes nothing: a pass takes what `costs` say. Requests follow their script."""

    device, dtype, num_layers, chains_only, has_blocks = torch.device("cpu"), torch.float32, 0, False, False
    tier, exact, tokenizer, eos, border, ends_early = "replay", True, None, (), ENDLESS, False
    packs, foreign, draw = False, False, None
    turns = Turns()

    def __init__(self, trace: Trace, costs: Costs, clock: MadeUpClock) -> None:
        header = trace.header
        self.name, self.vocab_size, self.context = header.target or header.model, header.vocab, header.context
        self.costs, self.clock = costs, clock
        self.overhead = header.overhead  # seconds of a round beside its pass
        self.share = 1.0  # of a whole pass, that drafters leave to do

    def check_fits(self, prompt: int, new: int) -> None:
        """It did when it was recorded."""

    def new_cache(self, rows: int, slots: int) -> KVCache:
        return KVCache.allocate(CacheShape(0, 1, 1), rows, slots, self.dtype, self.device)

    def prefill(self, ids: Sequence[int], cache: KVCache, taps: object = ()) -> dict[int, Tensor]:
        cache.lengths += len(ids)
        return {}

    def forward(self, span: Any, *_: object) -> Any:
        seconds = self.costs(span.batch * span.width, float(span.starts.mean()), span.batch)
        self.clock.spend(self.share * seconds + self.overhead)
        nothing = SimpleNamespace(logits=None, taps={})
        nothing.at = lambda places: nothing  # as merges ask for their parts' places
        return SimpleNamespace(logits=None, likeliest=None, row=lambda row, width: nothing)

    forward_greedy = forward


@dataclass
class TracedPlace:
    """A request's state: which text it is, and how much of it is prompt."""

    drafts: Sequence[TracedDraft]
    prompt: int
    budget: Budget | None = None
    length: int = 0


class Recorded:
    """A source's drafts, by text.

    Attributes:
        levels: seconds of each level of a draft.
    """

    def __init__(self, trace: Trace, name: str, target: RecordedTarget) -> None:
        self.about: Source = trace.header.sources[name]
        self.target, self.levels = target, self.about.levels
        self._texts = {tuple(text.prompt): text.drafts[name] for text in trace.texts}

    def find(self, row: Row) -> TracedPlace:
        """Where the request begins. Raises DataError for a text that the trace does not have."""
        drafts = self._texts.get(tuple(row.ids))
        if drafts is None:
            raise DataError("a replay knows the texts of its trace only")
        return TracedPlace(drafts, len(row.ids))

    def draft(self, row: Row, place: TracedPlace) -> TracedDraft:
        return place.drafts[len(row.ids) - place.prompt]

    def tree(self, row: Row, draft: TracedDraft, depth: int, least: float, nodes: int) -> TokenTree:
        """The `nodes` best nodes that are no deeper than `depth` and score `least`."""
        tree, places = TokenTree.root(row.ids[-1]), {0: 0}
        for node, (token, parent, score) in enumerate(zip(draft.tokens, draft.parents, draft.scores, strict=True), 1):
            fits = parent in places and tree.depths[places[parent]] < depth
            if fits and (score is None or score >= least) and tree.drafted < nodes:
                places[node] = tree.add(token, places[parent], self.about.name, score=score)
        return tree

    def spend(self, seconds: float) -> None:
        self.target.clock.spend(seconds)


class FreeSource(TreeDrafter):
    """A drafter without a model, from a trace."""

    def __init__(self, recorded: Recorded, target: Any, budget: int | str) -> None:
        super().__init__(target, budget)
        self.recorded, self.source = recorded, recorded.about.name
        self.max_candidates = min(self.max_candidates, recorded.about.nodes)

    def remember(self, row: Row) -> TracedPlace:
        return self.recorded.find(row)

    def propose(self, row: Row, memory: TracedPlace, depth: int, min_score: float) -> TokenTree:
        self.recorded.spend(self.recorded.levels[0])
        return self.recorded.tree(row, self.recorded.draft(row, memory), depth, min_score, self.max_candidates)

    def learn(self, *_: object) -> None:
        self.recorded.spend(self.recorded.about.observe)


class PaidSource(Drafter):
    """A drafter that pays for each level of its drafts, from a trace."""

    reads_costs = True

    def __init__(self, recorded: Recorded, target: Any, budget: int | str) -> None:
        super().__init__(target)
        self.recorded, self.source = recorded, recorded.about.name
        self.default_policy = recorded.about.policy
        self.competes = recorded.about.kind == SCORED
        self.auto = self.competes and budget == AUTO
        self.nodes = recorded.about.nodes if budget == AUTO else int(budget)

    @property
    def predictors(self) -> tuple[Path, ...]:
        return tuple(map(Path, self.recorded.about.predictors))

    def max_nodes(self, depth: int) -> int:
        return self.nodes

    def begin(self, row: Row, hidden: dict[int, Tensor]) -> None:
        row.state = self.recorded.find(row)
        row.state.budget = self.new_budget(row) if self.auto else None

    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        [row] = rows
        place: TracedPlace = row.state
        draft, depth, levels, policy = self.recorded.draft(row, place), 0, 0, row.policy
        place.length = len(row.ids)
        least = 0.0 if place.budget is None else place.budget.min_score(1, self.recorded.levels[-1])
        best = self._best(draft)
        while depth < min(row.room, len(best)) and policy.more(depth):
            if self.competes and depth and best[depth - 1] < least:
                break
            self.recorded.spend(self.recorded.levels[min(depth, len(self.recorded.levels) - 1)])
            levels += 1
            known = policy.reads_q and depth < len(draft.beliefs)  # a source may not ask its policy step by step
            if not policy.keep(distribution(tuple(draft.beliefs[depth])) if known else None, depth):
                break
            depth += 1
        self.recorded.target.share = self.recorded.about.pass_share if levels else 1.0
        tree = self.recorded.tree(row, draft, depth, 0.0, self.nodes)
        return [place.budget.choose(tree, slots=place.length) if place.budget else tree]

    def observe(self, row: Row, tree: TokenTree, path: list[int], out: object) -> None:
        self.recorded.spend(self.recorded.about.observe)
        if row.state.budget:
            row.state.budget.observe(row.ids[row.state.length :])

    @staticmethod
    def _best(draft: TracedDraft) -> list[float]:
        """By level, the score of its best node."""
        best, depths = list[float](), [0]
        for parent, score in zip(draft.parents, draft.scores, strict=True):
            depths.append(depths[parent] + 1)
            if depths[-1] > len(best):
                best.append(0.0)
            best[depths[-1] - 1] = max(best[depths[-1] - 1], 1.0 if score is None else score)
        return best


@cache
def distribution(belief: tuple[float, ...]) -> Float[Tensor, " tokens"]:
    """One with these largest probabilities and this entropy; what is left is spread evenly over as many tokens as that
    takes.
    """
    *top, entropy = belief
    left = max(1.0 - sum(top), 0.0)
    known = -sum(p * math.log(p) for p in top if p > 0)
    if left < 1e-5:
        return torch.tensor(top)
    count = round(min(max(left * math.exp(min((entropy - known) / left, 20.0)), 1.0), MOST_TAIL))
    return torch.tensor([*top, *[left / count] * count])
