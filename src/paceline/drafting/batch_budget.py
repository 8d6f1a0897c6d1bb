"""One budget for all requests that share a pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
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
    """What is verified of each request's candidates, so that the batch gets most tokens for its time: the best of all,
    as long as they bring more than the time for them would bring otherwise, at the rate of the whole batch.

    Where trees are padded to the widest, the only choice is that one's width: a further token of it costs as much as
    `rows` tokens, and every request fills it with the best candidate that it has left.

    Args:
        rows: how many requests share the pass: these, and others who have nothing to choose.
    """
    if not shares:
        return Spent([], 0.0, 0.0)
    if rows == 1:
        [(budget, plan, _, drafting, length)] = shares
        return Spent([budget.take(plan, drafting)], plan.gain, budget.rate(rows, length))
    costs, slots = shares[0].budget.costs, fmean(share.slots for share in shares)
    narrow, counts, choices = _packed(shares, rows) if shares[0].budget.packed else _padded(shares, rows)
    step = shares[0].budget.step(rows)
    widths = range(narrow, narrow + step * len(choices) + 1, step)
    seconds = costs.series(widths, slots, rows)
    rate = fmean(share.budget.rate(rows, slots) for share in shares)
    gains = [0.0]
    for at, choice in enumerate(choices):
        gains.append(gains[-1] + choice.brings - rate * (seconds[at + 1] - seconds[at]))
    most = max(gains)
    probed = costs.probe(widths, gains, rate)
    best = gains.index(most) if probed is None else widths.index(probed)
    counts.update(at for choice in choices[:best] for at in choice.of)
    taken = (seconds[best] + costs.between) / rows
    trees = [share.budget.verify(share.plan, counts[at], taken + share.drafting) for at, share in enumerate(shares)]
    return Spent(trees, most, rate)


class NextCandidates(NamedTuple):
    """A step by which a pass may grow: the next candidate of some requests.

    Attributes:
        brings: tokens that are expected of it.
        of: numbers of these requests.
    """

    brings: float
    of: Sequence[int]


class Growth(NamedTuple):
    """How a pass may grow.

    Attributes:
        narrow: tokens that it has anyway.
        room: candidates that cost nothing, by request.
        choices: what may be added, one after the other.
    """

    narrow: int
    room: Counter[int]
    choices: list[NextCandidates]


def _packed(shares: Sequence[Share], rows: int) -> Growth:
    """By one candidate at a time, the likeliest of all first."""
    choices = [NextCandidates(brings, [at]) for at, share in enumerate(shares) for brings in share.plan.probabilities]
    choices.sort(key=attrgetter("brings"), reverse=True)
    return Growth(rows + sum(share.others for share in shares), Counter(), choices)


def _padded(shares: Sequence[Share], rows: int) -> Growth:
    """By one candidate of every request at a time."""
    narrow = max(share.others for share in shares)
    wide = max(share.others + len(share.plan.order) for share in shares)
    room = Counter({at: min(narrow - share.others, len(share.plan.order)) for at, share in enumerate(shares)})
    choices = []
    for width in range(narrow, wide):
        of = [at for at, share in enumerate(shares) if width - share.others < len(share.plan.order)]
        choices.append(NextCandidates(sum(shares[at].plan.probabilities[width - shares[at].others] for at in of), of))
    return Growth(rows * (narrow + 1), room, choices)


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
