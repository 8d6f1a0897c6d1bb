"""`budget=auto`, which chooses for `auto`, against the best there is, where acceptance and costs are known: a
simulation, without a model.

    python benchmarks/budgets.py [--verify 0.1] [--rounds 800] [--seeds 3]

Each round drafts a tree of two tokens after every node, four deep. Of two siblings the first is right with a
probability whose log odds lie around those of its regime (see stopping.py), the second with 0.4 of what is left. The
drafter is surer of itself than it should be. The clairvoyant rule knows the probability of every node and the rate of
the long run; not what will be accepted.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from stopping import REGIMES, odds_around, sigmoid

from paceline.drafting.budget import Budget, best_first
from paceline.drafting.tree import TokenTree
from paceline.targets.cost_model import Costs

DEPTH, SECOND = 4, 0.4


class Guessed(NamedTuple):
    """A round: the whole tree, with the drafter's scores; the true probability of each node; the text that follows."""

    tree: TokenTree
    chances: list[float]
    text: list[int]


Rule = Callable[[Guessed], TokenTree]  # what to verify of a round's draft


def drawn(base: float, rng: random.Random) -> Guessed:
    tree, chances, text = TokenTree.root(0), [1.0], list[int]()
    level, true = [0], 0
    for _ in range(DEPTH):
        following, at = [], -1
        for node in level:
            odds = odds_around(base, rng)
            first, said = sigmoid(odds), min(sigmoid(1.3 * odds + 0.5), 0.99)
            u = rng.random()
            for token, chance, share in ((1, first, said), (2, SECOND * (1 - first), SECOND * (1 - said))):
                score = (tree.scores[node] or 1.0) * share
                following.append(tree.add(token, node, "made-up", score=score))
                chances.append(chances[node] * chance)
            if node == true and u < first + SECOND * (1 - first):
                at = following[-2] if u < first else following[-1]
        if true >= 0:
            text.append(tree.tokens[at] if at >= 0 else 3)
        level, true = following, at
    return Guessed(tree, chances, [*text, 3])


def played(
    rule: Rule, regime: str, costs: Costs, options: argparse.Namespace, seed: int, budget: Budget | None = None
) -> float:
    """Tokens by the time of a plain round."""
    rng, tokens, time = random.Random(seed), 0, 0.0
    for turn in range(options.rounds):
        guessed = drawn(REGIMES[regime](turn), rng)
        kept = rule(guessed)
        node, accepted = 0, 0
        while (child := kept.child(node, guessed.text[accepted])) is not None:
            node, accepted = child, accepted + 1
        tokens, time = tokens + accepted + 1, time + costs(1 + kept.drafted)
        if budget:
            budget.observe(guessed.text[: accepted + 1])
    return tokens / time


def best_nodes(guessed: Guessed, rate: float, costs: Costs) -> TokenTree:
    """What brings most tokens less `rate` times their time."""
    order, gain, most, count = list[int](), 0.0, 0.0, 0
    for node in best_first(guessed.chances):
        order.append(node)
        gain += guessed.chances[node] - rate * (costs(1 + len(order)) - costs(len(order)))
        if gain > most:
            count, most = len(order), gain
    return guessed.tree.keep(order[:count])


def clairvoyant(regime: str, costs: Costs, options: argparse.Namespace, seed: int) -> float:
    """Its rate is found by trying again with the one it came to."""
    rate = 1.0
    for _ in range(6):
        rate = played(lambda one, rate=rate: best_nodes(one, rate, costs), regime, costs, options, seed)
    return rate


def fixed(nodes: int) -> Rule:
    return lambda guessed: guessed.tree.keep(best_first([score or 1.0 for score in guessed.tree.scores])[:nodes])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verify", type=float, default=0.1, help="cost of verifying a token, in plain rounds")
    parser.add_argument("--rounds", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    costs, seeds = Costs({1: 1.0, 2: 1.0 + options.verify}), range(options.seeds)
    best = {regime: [clairvoyant(regime, costs, options, seed) for seed in seeds] for regime in REGIMES}
    table = Table(title=f"of the clairvoyant rule's rate; a token costs {options.verify:g} rounds", box=None)
    for title in ("", *REGIMES):
        table.add_column(title, justify="right" if title else "left")
    mean = {regime: math.fsum(found) / len(found) for regime, found in best.items()}
    table.add_row("clairvoyant, tokens a plain round", *(f"{rate:.2f}" for rate in mean.values()))
    for name, nodes in {"auto": None, **{str(nodes): nodes for nodes in (0, 1, 2, 4, 8, 16)}}.items():
        cells = []
        for regime in REGIMES:
            rates = []
            for seed in seeds:
                budget = Budget(costs) if nodes is None else None
                rule: Rule = fixed(nodes) if nodes is not None else lambda one, budget=budget: budget.choose(one.tree)
                rates.append(played(rule, regime, costs, options, seed, budget))
            cells.append(f"{math.fsum(rates) / len(rates) / mean[regime]:.3f}")
        table.add_row(f"budget={name}", *cells)
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
