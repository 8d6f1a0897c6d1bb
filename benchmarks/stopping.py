"""Stopping policies against the best there is, where acceptance and costs are known: a simulation, without a model.

    python benchmarks/stopping.py [--draft 0.1] [--verify 0.05] [--rounds 800] [--seeds 3] [--each 80]

A drafted token is accepted with a probability whose log odds lie around those of its regime (standard deviation 1): the
same all the time ("stationary", and "poor"), slowly up and down ("drifting"), or by turns good and bad for 40 rounds
each ("bursty"). Policies see a draft distribution that is surer of itself than it should be. The clairvoyant rule knows
the regime, each token's true probability once it is drafted, and the rate of the long run; not what will be accepted.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator
from functools import cache

import torch
from rich.console import Console
from rich.table import Table

from paceline.policies.adaedl import AdaEDL
from paceline.policies.base import Setting, StoppingPolicy
from paceline.policies.beta_ts import BetaTS
from paceline.policies.cali_ts import CaliTS
from paceline.policies.fixed import Fixed
from paceline.policies.long_run import LongRun
from paceline.policies.max_confidence import MaxConfidence
from paceline.policies.pace import Pace

MOST, TOKENS = 16, 8  # drafted tokens of a round; tokens of the made-up vocabulary
REGIMES: dict[str, Callable[[int], float]] = {
    "stationary": lambda turn: 0.6,
    "drifting": lambda turn: 0.5 + 0.4 * math.sin(turn / 60),
    "bursty": lambda turn: 0.9 if turn // 40 % 2 else 0.15,
    "poor": lambda turn: 0.25,
}
POLICIES: dict[str, Callable[[], StoppingPolicy]] = {
    "pace": Pace,
    "beta-ts:cost=auto": lambda: BetaTS(cost="auto"),
    "cali-ts:cost=auto": lambda: CaliTS(cost="auto"),
    "beta-ts": BetaTS,
    "cali-ts": CaliTS,
    "adaedl": lambda: AdaEDL(k_max=MOST),
    "max-confidence": lambda: MaxConfidence(k_max=MOST),
    **{f"fixed:k={k}": lambda k=k: Fixed(k=k) for k in (0, 1, 2, 3, 4, 6)},
}


def sigmoid(odds: float) -> float:
    return 1 / (1 + math.exp(-odds))


def odds_around(base: float, rng: random.Random) -> float:
    return math.log(base / (1 - base)) + rng.gauss(0, 1)


@cache
def mean_chance(base: float) -> float:
    """Of a token of which nothing is known but its regime."""
    rng = random.Random(5)
    return sum(sigmoid(odds_around(base, rng)) for _ in range(2000)) / 2000


class Round:
    """What a round would bring: log odds of each token, and whether it would be right if those before it were."""

    def __init__(self, base: float, rng: random.Random) -> None:
        self.base = base
        self.odds = [odds_around(base, rng) for _ in range(MOST + 1)]
        self.right = [rng.random() < sigmoid(odds) for odds in self.odds]

    def distribution(self, depth: int) -> torch.Tensor:
        top = min(max(sigmoid(1.3 * self.odds[depth] + 0.5), 1 / TOKENS), 0.999)
        return torch.tensor([top, *[(1 - top) / (TOKENS - 1)] * (TOKENS - 1)])

    def accepted(self, drafted: int) -> int:
        return next(at for at in range(MOST + 1) if at == drafted or not self.right[at])


def rounds(regime: str, count: int, seed: int) -> Iterator[Round]:
    rng = random.Random(seed)
    for turn in range(count):
        yield Round(REGIMES[regime](turn), rng)


def reached(
    make: Callable[[], StoppingPolicy], regime: str, options: argparse.Namespace, seed: int, *, anew: bool = False
) -> float:
    """Tokens by the time of a plain round, over requests that follow each other, or each begin `anew`."""
    before: dict[type, StoppingPolicy] = {}
    tokens, time, policy = 0, 0.0, placed(make(), options, seed, before)
    for turn, one in enumerate(rounds(regime, options.rounds, seed)):
        if turn and turn % options.each == 0:
            policy = placed(make(), options, seed + turn, {} if anew else before)
        forwards = count = 0
        while count < MOST and policy.more(count):
            forwards += 1
            if not policy.keep(one.distribution(count) if policy.reads_q else None, count):
                break
            count += 1
        accepted = one.accepted(count)
        policy.observe(count, accepted)
        tokens, time = tokens + accepted + 1, time + 1 + options.draft * forwards + options.verify * count
    return tokens / time


def placed(
    policy: StoppingPolicy, options: argparse.Namespace, seed: int, before: dict[type, StoppingPolicy]
) -> StoppingPolicy:
    policy.seed(seed)
    policy.check(
        Setting(
            *("model", "drafter", None, None),
            cost=lambda k: 1 + (options.draft + options.verify) * k,
            pass_cost=lambda k: 1 + options.verify * k,
            before=before,
        )
    )
    return policy


def clairvoyant(regime: str, options: argparse.Namespace, seed: int) -> float:
    """The same of the rule that knows; its rate is found by trying again with the one it came to."""
    run, rate = LongRun(lambda k: 1 + (options.draft + options.verify) * k), 1.0
    for _ in range(8):
        tokens, time = 0, 0.0
        for one in rounds(regime, options.rounds, seed):
            chance, probability, forwards, count = mean_chance(one.base), 1.0, 0, 0
            while run.worth(rate, count, probability, chance, MOST) > 0:
                forwards += 1
                next_one = probability * sigmoid(one.odds[count])
                if next_one + run.worth(rate, count + 1, next_one, chance, MOST) <= rate * options.verify:
                    break
                probability, count = next_one, count + 1
            tokens += one.accepted(count) + 1
            time += 1 + options.draft * forwards + options.verify * count
        rate = tokens / time
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=float, default=0.1, help="cost of drafting a token, in plain rounds")
    parser.add_argument("--verify", type=float, default=0.05, help="cost of verifying one")
    parser.add_argument("--rounds", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--each", type=int, help="of a request, which begins where the one before stood; default all")
    options = parser.parse_args()
    options.each = options.each or options.rounds
    seeds = range(options.seeds)
    table = Table(
        title=f"of the clairvoyant rule's rate; a token costs {options.draft:g} + {options.verify:g} rounds", box=None
    )
    for title in ("", *REGIMES):
        table.add_column(title, justify="right" if title else "left")
    best = {regime: sum(clairvoyant(regime, options, seed) for seed in seeds) / len(seeds) for regime in REGIMES}
    table.add_row("clairvoyant, tokens a plain round", *(f"{rate:.2f}" for rate in best.values()))
    ways = [(name, make, False) for name, make in POLICIES.items()]
    if options.each < options.rounds:
        ways.insert(1, ("pace, each request anew", Pace, True))
    for name, make, anew in ways:
        found = [
            sum(reached(make, regime, options, seed, anew=anew) for seed in seeds) / len(seeds) / best[regime]
            for regime in REGIMES
        ]
        table.add_row(name, *(f"{value:.3f}" for value in found))
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
