"""One budget for all requests that share a pass."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from paceline.drafting.budget import Budget, Deferred, Selection
from paceline.drafting.tree import TokenTree


class Share(NamedTuple):
    """One request's part of a pass.

    Attributes:
        plan: its candidates.
        others: nodes that are verified besides them.
        drafting: seconds that drafting them took.
        slots: tokens that the request has in the KV cache.
    """

    budget: Budget
    plan: Selection
    others: int
    drafting: float
    slots: int


class Spent(NamedTuple):
    """What is verified of each request's candidates.

    Attributes:
        gain: tokens that they are expected to bring, less those that their time would bring otherwise.
        rate: these, a second.
    """

    trees: list[TokenTree]
    gain: float
    rate: float


def spend(shares: Sequence[Share], rows: int) -> Spent:
    """What is verified of each request's candidates, so that the batch gets most tokens for its time.

    All trees are padded to the widest, so the only choice is that one's width: a further token of it costs as much as
    `rows` tokens, and every request fills it with the best candidates that it has left. It is worth it where these
    bring more than the time would bring otherwise, at the rate of the whole batch.

    Args:
        rows: how many requests share the pass: these, and others who have nothing to choose.
    """
    if not shares:
        return Spent([], 0.0, 0.0)
    if rows == 1:
        [(budget, plan, _, drafting, length)] = shares
        return Spent([budget.take(plan, drafting)], plan.gain, budget.rate(rows, length))
    costs, slots = shares[0].budget.costs, fmean(share.slots for share in shares)
    narrow = max(share.others for share in shares)
    wide = max(share.others + len(share.plan.order) for share in shares)
    widths = range(rows * (narrow + 1), rows * (wide + 1) + 1, rows)
    seconds = costs.series(widths, slots, rows)
    rate = fmean(share.budget.rate(rows, slots) for share in shares)
    gains = [0.0]
    for width in range(narrow + 1, wide + 1):
        brought = sum(sum(share.plan.probabilities[width - share.others - 1 :][:1]) for share in shares)
        gains.append(gains[-1] + brought - rate * (seconds[width - narrow] - seconds[width - narrow - 1]))
    most = max(gains)
    probed = costs.probe(widths, gains, rate)
    best = narrow + (gains.index(most) if probed is None else widths.index(probed))
    taken = (seconds[best - narrow] + costs.between) / rows
    trees = [
        share.budget.verify(share.plan, min(best - share.others, len(share.plan.order)), taken + share.drafting)
        for share in shares
    ]
    return Spent(trees, most, rate)


def choose(
    budgets: Sequence[Budget | None], trees: Sequence[TokenTree], slots: Sequence[int], rows: int, drafting: float
) -> list[TokenTree]:
    """What is verified of trees that took `drafting` seconds together; all of those that have no budget of their own.

    Args:
        slots: tokens that each request has in the KV cache.
        rows: as of `spend`.
    """
    chosen = list(trees)
    shares = {
        at: Share(budget, budget.plan(tree, rows, slots=length), 0, drafting / len(trees), length)
        for at, (budget, tree, length) in enumerate(zip(budgets, trees, slots, strict=True))
        if budget and not isinstance(budget, Deferred)
    }
    for at, tree in zip(shares, spend(list(shares.values()), rows).trees, strict=True):
        chosen[at] = tree
    return chosen
