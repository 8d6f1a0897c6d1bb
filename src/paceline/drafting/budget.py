"""`budget=auto`: how many candidates a round verifies, so that tokens come fastest on this machine.

A round that verifies b candidates gives 1 + sum of P(accepted) tokens and takes T(b + 1) seconds. Over many rounds most
tokens a second come when every round maximises the tokens it gives less rho times the seconds it takes, where rho
is the rate that is reached in the long run (renewal reward; Dinkelbach's form of a fraction's maximum). No candidate
at all, plain decoding, is one of the choices.

P(accepted) is the product of P(right, if what comes before it is) along the path: what the drafter says, corrected by
how often candidates of which it said so were right lately. What would have become of candidates that were not verified
shows in the output as well, so nothing is spent on exploration.
"""

from __future__ import annotations

import heapq
from bisect import bisect
from collections.abc import Iterator, Sequence

from paceline.drafting.tree import TokenTree
from paceline.targets.cost_model import Costs

AUTO = "auto"

TRUST = 0.5  # of the tokens that drafters expect to be right so many are, until the request shows better
PRIOR = 6.0  # expected tokens whose outcome weighs as much as that
FADING = 0.5 ** (1 / 100)  # what was seen counts half after 100 rounds
CLASSES = (0.5,)  # tokens that are expected with more, or less, are judged apart
START = 8.0  # rounds of plain decoding that the rate starts from
DOUBT = 2.0  # the factor by which drafters may expect too little


class Budget:
    """Chooses among one request's candidates, round by round."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._seen: dict[tuple[str, int], list[float]] = {}  # (source, class) -> [acceptances, sum of scores], fading
        self._tokens, self._seconds = 0.0, 0.0  # fading
        self._waiting: tuple[TokenTree, float] | None = None

    def rate(self, rows: int, slots: int | None = None) -> float:
        """Tokens a second of this request when `rows` of them share a pass, all wanting as much as it does."""
        return (START + self._tokens) / (START * self.costs(rows, slots, rows) / rows + self._seconds)

    def min_score(self, rows: int, drafting: float = 0.0) -> float:
        """Candidates with lower scores than this are as good as never worth verifying; nor, if a level takes `drafting`
        seconds, is what comes after them worth drafting.
        """
        return self.rate(rows) * (self.costs.slope / DOUBT + drafting / TRUST)

    def choose(self, tree: TokenTree, rows: int = 1, others: int = 0, slots: int | None = None) -> TokenTree:
        """The part of `tree` that is worth verifying, best candidates first; all its nodes have scores.

        Args:
            rows: how many requests share the pass.
            others: nodes that are verified besides those of `tree`.
            slots: tokens that the request has in the KV cache; None: as many as where costs were measured.
        """
        rate, order = self.rate(rows, slots), list[int]()
        costs, gain, best, count = [self.costs(rows * (others + 1), slots, rows) / rows], 0.0, 0.0, 0
        for node, probability in best_first(tree, self._probabilities(tree)):
            order.append(node)
            costs.append(self.costs(rows * (others + len(order) + 1), slots, rows) / rows)
            gain += probability - rate * (costs[-1] - costs[-2])
            if gain > best:
                count, best = len(order), gain
        probed = self.costs.probe([rows * (others + 1 + drafted) for drafted in range(len(costs))])
        if probed is not None:
            count = probed // rows - others - 1
        self._waiting = (tree, costs[count])
        return tree.keep(order[:count])

    def observe(self, ids: Sequence[int]) -> None:
        """The outcome of the round that `choose` was last asked about: the tokens that came behind the root."""
        if self._waiting is None:
            return
        (tree, cost), self._waiting = self._waiting, None
        for seen in self._seen.values():
            seen[0] *= FADING
            seen[1] *= FADING
        self._tokens = self._tokens * FADING + len(ids)
        self._seconds = self._seconds * FADING + cost
        right = [True] + [False] * tree.drafted
        for node in range(1, len(tree)):
            depth, parent = tree.depths[node], tree.parents[node]
            if right[parent] and depth <= len(ids):
                right[node] = tree.tokens[node] == ids[depth - 1]
                share = _share(tree, node)
                seen = self._seen.setdefault((tree.sources[node], bisect(CLASSES, share)), [0.0, 0.0])
                seen[0] += right[node]
                seen[1] += share

    def _probabilities(self, tree: TokenTree) -> list[float]:
        """By node. Right tokens are a Poisson process, whose rate is what the drafter says times an unknown factor."""
        found = [1.0]
        for node in range(1, len(tree)):
            share = _share(tree, node)
            right, expected = self._seen.get((tree.sources[node], bisect(CLASSES, share)), (0.0, 0.0))
            found.append(found[tree.parents[node]] * min(share * (TRUST * PRIOR + right) / (PRIOR + expected), 1.0))
        return found


def _share(tree: TokenTree, node: int) -> float:
    """What the drafter says of P(the token is right | those before it are)."""
    return (tree.scores[node] or 0.0) / (tree.scores[tree.parents[node]] or 1.0)


def best_first(tree: TokenTree, probabilities: Sequence[float]) -> Iterator[tuple[int, float]]:
    """The drafted nodes and their probabilities, which are at most their parents': the best first."""
    below: list[list[int]] = [[] for _ in range(len(tree))]
    for node in range(1, len(tree)):
        below[tree.parents[node]].append(node)
    heap = [(-1.0, 0)]
    while heap:
        worth, node = heapq.heappop(heap)
        if node:
            yield node, -worth
        for child in below[node]:
            heapq.heappush(heap, (max(-probabilities[child], worth), child))
