"""What several drafters propose for one request, together."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from paceline.drafting.batch_budget import Share
from paceline.drafting.budget import Budget, Selection, best_first
from paceline.drafting.gate import Gate
from paceline.drafting.tree import TokenTree


class Pool:
    """One request's candidates of a round, and what is worth verifying of them.

    Args:
        root: the request's last token.
        slots: tokens that it has in the KV cache.
        budget: chooses among the candidates; None: nobody does.
        gates: by number of a drafter, whether it is worth asking; None: all are.
        rows: how many requests share the pass.
        others: nodes that are verified besides these candidates.
        most: candidates that may be verified; None: all.
    """

    def __init__(
        self,
        root: int,
        slots: int,
        budget: Budget | None,
        gates: Mapping[int, Gate] | None,
        rows: int = 1,
        others: int = 0,
        most: int | None = None,
    ) -> None:
        self.tree, self._budget, self._gates = TokenTree.root(root), budget, gates
        self._slots, self._rows, self._others, self._most = slots, rows, others, most
        self._drafting = 0.0  # seconds
        self._rate: float | None = None  # tokens a second, this round
        self._plan: Selection | None = None  # of the candidates that there are

    def asks(self, at: int, seconds: float, random: Random) -> bool:
        """Whether drafter number `at` is worth asking for so long, beside what there is already."""
        if self._gates is None or self._budget is None:
            return True
        if self._rate is None:
            self._rate = self._budget.rate(self._rows, self._slots)
        return self._gates[at].asks(self._gain, self._rate * seconds, random)

    def take(self, at: int, own: TokenTree, seconds: float) -> None:
        """Add what drafter number `at` proposes; it took so long."""
        before = self._gain
        if self._add(own):
            self._plan = None
        self._drafting += seconds
        if self._gates:
            self._gates[at].learn(before, self._gain - before)

    @property
    def share(self) -> Share:
        """Of the batch's budget."""
        assert self._budget
        return Share(self._budget, self._planned(self._budget), self._others, self._drafting, self._slots)

    def best(self, most: int) -> TokenTree:
        """The `most` nodes with the best scores."""
        scores = [1.0]
        for score, parent in zip(self.tree.scores[1:], self.tree.parents[1:], strict=True):
            scores.append(min(score or 0.0, scores[parent]))
        return self.tree.keep(best_first(scores)[:most])

    @property
    def _gain(self) -> float:
        """What the candidates are worth."""
        return self._planned(self._budget).gain if self._budget and self.tree.drafted else 0.0

    def _planned(self, budget: Budget) -> Selection:
        if self._plan is None:
            self._plan = budget.plan(self.tree, self._rows, self._others, self._slots, self._most)
        return self._plan

    def _add(self, own: TokenTree) -> bool:
        """Add candidates: each token once, as the proposal of the source that is more to be believed there. False where
        nothing changes.

        Sources are compared by what they say of a token if those before it are right. So a source that is surer of a
        token says nothing against what another has after it.
        """
        tree = self.tree
        if not tree.drafted:
            self.tree = own
            return own.drafted > 0
        changed = False
        there = {edge: node for node, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))}
        shares, to = _shares(tree), [0]
        for node, share in enumerate(_shares(own)[1:], start=1):
            parent, token, source = to[own.parents[node]], own.tokens[node], own.sources[node]
            place = there.get((parent, token))
            if place is None:
                place = there[parent, token] = tree.add(token, parent, source)
                shares.append(share)
                changed = True
            elif self._trusted(source, share) > self._trusted(tree.sources[place], shares[place]):
                shares[place], tree.sources[place], changed = share, source, True
            to.append(place)
        if changed:
            for node, parent in enumerate(tree.parents[1:], start=1):
                tree.scores[node] = (tree.scores[parent] or 1.0) * shares[node]
        return changed

    def _trusted(self, source: str, share: float) -> float:
        return self._budget.right(source, share) if self._budget else share


def _shares(tree: TokenTree) -> list[float]:
    """Of each node what its source says of P(it is right | those before it are)."""
    scores = tree.scores
    after = zip(tree.parents[1:], scores[1:], strict=True)
    return [1.0, *((score or 0.0) / (scores[parent] or 1.0) for parent, score in after)]
