"""`budget=auto`: how many candidates a round verifies, so that tokens come fastest on this machine.

A round that verifies b candidates gives 1 + sum of P(accepted) tokens and takes T(b + 1) seconds. Over many rounds most
tokens a second come when every round maximises the tokens it gives less rho times the seconds it takes, where rho
is the rate that is reached in the long run (renewal reward; Dinkelbach's form of a fraction's maximum). No candidate
at all, plain decoding, is one of the choices.

P(accepted) is the product of P(right, if what comes before it is) along the path: what the drafter says, corrected by
how often candidates of which it said so were right lately, in this request and before it. What would have become of
candidates that were not verified shows in the output as well, so nothing is spent on exploration.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

from paceline.drafting.tree import TokenTree
from paceline.policies.long_run import Rate
from paceline.targets.cost_model import Costs

TRUST = 0.5  # of the tokens that drafters expect to be right so many are, until the request shows better
PRIOR = 6.0  # expected tokens whose outcome weighs as much as that
FADING = 0.5 ** (1 / 100)  # what a request has shown counts half after 100 rounds
LASTING = 0.5 ** (1 / 2000)  # and for the requests that come after it after 2000
HEAVY = 1e6  # a weight of what is new that is as good as any
CLASSES = (0.5,)  # tokens that are expected with more, or less, are judged apart
GOES_ON = 0.6  # how often a drafted token is right after one that was
DOUBT = 2.0  # the factor by which drafters may expect too little


class Calibration:
    """How often candidates were right, beside how often their drafter expected it: by source and how sure it was.

    Right tokens are a Poisson process, whose rate is what the drafter says times an unknown factor.

    Args:
        before: what is believed before anything is seen; None: `TRUST` of what drafters say.
        fading: what was seen counts so much less each round.
        tells: whether `before` learns of all that is seen.
    """

    def __init__(self, before: Calibration | None = None, fading: float = LASTING, tells: bool = True) -> None:
        self._before, self._told, self._fading = before, before if tells else None, fading
        self._seen: dict[tuple[str, int], list[float]] = {}  # acceptances, sum of shares; in units of `_weight`
        self._weight = 1.0  # of what is seen now: this grows instead of all that was seen being scaled down

    def factor(self, source: str, kind: int) -> float:
        trust = self._before.factor(source, kind) if self._before else TRUST
        right, expected = self._seen.get((source, kind), (0.0, 0.0))
        prior = PRIOR * self._weight
        return (trust * prior + right) / (prior + expected)

    def fade(self) -> None:
        """A round has passed."""
        self._weight /= self._fading
        if self._weight > HEAVY:
            self._seen = {key: [value / self._weight for value in seen] for key, seen in self._seen.items()}
            self._weight = 1.0
        if self._told:
            self._told.fade()

    def learn(self, source: str, kind: int, right: bool, share: float) -> None:
        """A candidate of which its drafter said P(right) = `share` turned out to be right, or wrong."""
        seen = self._seen.setdefault((source, kind), [0.0, 0.0])
        seen[0] += right * self._weight
        seen[1] += share * self._weight
        if self._told:
            self._told.learn(source, kind, right, share)

    def kept(self) -> list[list[Any]]:
        """What was seen, ready for JSON: see `restore`."""
        return [[*key, *(value / self._weight for value in seen)] for key, seen in self._seen.items()]

    def restore(self, kept: Sequence[Sequence[Any]]) -> None:
        """Go on from what another had seen. Raises ValueError for what none could have."""
        found = {(str(source), int(kind)): [float(right), float(share)] for source, kind, right, share in kept}
        if not all(0 <= value < inf for seen in found.values() for value in seen):
            raise ValueError("counts are 0 or more")
        self._seen |= {key: [value * self._weight for value in seen] for key, seen in found.items()}


class Selection(NamedTuple):
    """How much of a tree is worth verifying.

    Attributes:
        order: its nodes, the most probable first.
        probabilities: of these, that they are accepted.
        costs, widths: of the round, by how many of them are verified: seconds of the request's share, without drafting,
            and tokens.
        gains: tokens that so many are expected to bring, less those that their time would bring otherwise.
        rate: these, a second of a pass.
        plain: seconds of the request's share of a pass without drafts.
    """

    tree: TokenTree
    order: list[int]
    probabilities: list[float]
    costs: list[float]
    widths: Sequence[int]
    gains: list[float]
    rate: float
    plain: float

    @property
    def gain(self) -> float:
        """The most that can be gained."""
        return max(self.gains)

    @property
    def best(self) -> int:
        """How many are worth it."""
        return self.gains.index(self.gain)


class Budget:
    """Chooses among one request's candidates, round by round.

    Args:
        costs: of the target's passes.
        before: what requests before this one have shown of the drafters; it learns from this one.
        packed: of several requests that share a pass, each has as many nodes as are worth it; else all are padded to
            the widest.
        chains: whether the target reads no branches: the best path is all that is chosen from.
    """

    def __init__(
        self, costs: Costs, before: Calibration | None = None, packed: bool = False, chains: bool = False
    ) -> None:
        self.costs, self.packed, self._chains = costs, packed, chains
        self._calibration = Calibration(before, FADING)
        self._factors: dict[str, list[float]] = {}  # this round's, by source and class
        self._rate = Rate()  # in plain rounds with as many requests as there are: it holds when others come and go
        self._waiting: tuple[TokenTree, float] | None = None

    def rate(self, rows: int, slots: float | None = None) -> float:
        """Tokens a second of this request when `rows` of them share a pass, all wanting as much as it does."""
        return self._rate() / self._plain(rows, slots)

    def step(self, rows: int) -> int:
        """Tokens by which a pass grows for one more node of a request: its own, or one of every request."""
        return 1 if self.packed else rows

    def min_score(self, rows: int, drafting: float = 0.0) -> float:
        """Candidates with lower scores than this are as good as never worth verifying. If a level takes `drafting`
        seconds: what comes after such candidates is not worth drafting, as a rule.
        """
        if drafting:
            return self.rate(rows) * (self.costs.slope + drafting) / GOES_ON
        return self.rate(rows) * self.costs.slope / DOUBT

    def choose(self, tree: TokenTree, rows: int = 1, others: int = 0, slots: int | None = None) -> TokenTree:
        """The part of `tree` that is worth verifying, best candidates first: `take` what was `plan`ned."""
        return self.take(self.plan(tree, rows, others, slots))

    def plan(
        self, tree: TokenTree, rows: int = 1, others: int = 0, slots: int | None = None, nodes: int | None = None
    ) -> Selection:
        """What would be worth verifying of `tree`, all of whose nodes have scores.

        Args:
            rows: how many requests share the pass.
            others: nodes that are verified besides those of `tree`.
            slots: tokens that the request has in the KV cache; None: as many as where costs were measured.
            nodes: most that may be verified; None: all.
        """
        narrow, plain = rows * (others + 1), self._plain(rows, slots)
        if not tree.drafted:
            alone = (self.costs(narrow, slots, rows) + self.costs.between) / rows
            return Selection(tree, [], [], [alone], [narrow], [0.0], 0.0, plain)
        step = self.step(rows)
        rate = self._rate() / plain / step
        probabilities = self._probabilities(tree)
        order = (tree.most_promising(probabilities) if self._chains else best_first(probabilities))[:nodes]
        widths = range(narrow, narrow + step * len(order) + 1, step)
        seconds = self.costs.series(widths, slots, rows)
        alone = (seconds[0] + self.costs.between) / rows
        costs = [alone + (wider - seconds[0]) / step for wider in seconds]
        probabilities = [probabilities[node] for node in order]
        gains = [0.0]
        for count, probability in enumerate(probabilities, start=1):
            gains.append(gains[-1] + probability - rate * (seconds[count] - seconds[count - 1]))
        return Selection(tree, order, probabilities, costs, widths, gains, rate, plain)

    def take(self, plan: Selection, drafting: float = 0.0) -> TokenTree:
        """The planned part of the tree, or now and then another for the sake of knowing what a pass costs.

        Args:
            drafting: seconds that it took to draft the tree.
        """
        probed = self.costs.probe(plan.widths, plan.gains, plan.rate)
        count = plan.best if probed is None else plan.widths.index(probed)
        return self.verify(plan, count, plan.costs[count] + drafting)

    def verify(self, plan: Selection, count: int, seconds: float) -> TokenTree:
        """The best `count` nodes of a plan; drafting and verifying them takes this request so many seconds."""
        self._waiting = (plan.tree, seconds / plan.plain)
        return plan.tree.keep(plan.order[:count])

    def observe(self, ids: Sequence[int]) -> None:
        """The outcome of the round whose tree `choose` or `verify` gave last: the tokens that came after the root."""
        if self._waiting is None:
            return
        (tree, time), self._waiting = self._waiting, None
        self._factors.clear()
        self._calibration.fade()
        self._rate.observe(len(ids), time)
        right = [True] + [False] * tree.drafted
        for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True)):
            if node and right[parent] and depth <= len(ids):
                right[node] = tree.tokens[node] == ids[depth - 1]
                share = (tree.scores[node] or 0.0) / (tree.scores[parent] or 1.0)
                self._calibration.learn(tree.sources[node], bisect(CLASSES, share), right[node], share)

    def _plain(self, rows: int, slots: float | None) -> float:
        """Seconds of this request's share of a pass without drafts."""
        return (self.costs(rows, slots, rows) + self.costs.between) / rows

    def _probabilities(self, tree: TokenTree) -> list[float]:
        """P(accepted) of all nodes."""
        scores, sources, found = tree.scores, tree.sources, [1.0]
        for node, parent in enumerate(tree.parents[1:], start=1):
            # What the drafter says of P(the token is right | those before it are), corrected.
            share = (scores[node] or 0.0) / (scores[parent] or 1.0)
            right = share * self._factor(sources[node])[bisect(CLASSES, share)]
            found.append(found[parent] * right if right < 1.0 else found[parent])
        return found

    def right(self, source: str, share: float) -> float:
        """P(a token is right | those before it are), of which its source says `share`."""
        return share * self._factor(source)[bisect(CLASSES, share)]

    def _factor(self, source: str) -> list[float]:
        """By class; they stay as they are until the round's outcome."""
        factors = self._factors.get(source)
        if factors is None:
            factors = [self._calibration.factor(source, kind) for kind in range(len(CLASSES) + 1)]
            self._factors[source] = factors
        return factors


class Deferred(Budget):
    """Stands for the budget of a drafter whose candidates compete in another's, which it asks what pays."""

    def __init__(self, budget: Budget | None) -> None:
        self._budget = budget

    def min_score(self, rows: int, drafting: float = 0.0) -> float:
        return self._budget.min_score(rows, drafting) if self._budget else 0.0

    def choose(self, tree: TokenTree, rows: int = 1, others: int = 0, slots: int | None = None) -> TokenTree:
        return tree

    def observe(self, ids: Sequence[int]) -> None:
        """The other one does."""


def best_first(probabilities: Sequence[float]) -> list[int]:
    """The drafted nodes, the best first; parents before children, since none is more probable than its parent."""
    return sorted(range(1, len(probabilities)), key=probabilities.__getitem__, reverse=True)
