"""Cali-TS's parts at every sigma: what the predictor and what the sampling on top of it are worth.

    python benchmarks/early_exit_sigma.py record --answers FILE --out DRAFTS [--each 4] [--drafter early-exit]
    python benchmarks/early_exit_sigma.py sweep --drafts DRAFTS [--seeds 10] [--cost 0.38] [--out RESULT]

`record` walks the drafter over answers (of `trigram_answers.py`), one token at a time, and keeps what it drafts after
every one: how many tokens were right, and what a policy sees of each. `sweep` then has policies decide over these
records, which needs no model, so that many rules and seeds cost nothing. Policies draft what was recorded, so none
drafts more than DEPTH tokens. Its speedup is what equation 14 predicts for a drafted token that costs C target passes.

After (sigma_s / sigma_m)^2 rounds predictor and outcomes weigh the same: a small quotient is mostly outcomes.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.progress import track
from table import markdown

import paceline
from paceline.decoding.request import Request
from paceline.decoding.verify import Outcome
from paceline.policies import POLICIES, predictors
from paceline.policies.base import Setting, StoppingPolicy
from paceline.policies.fixed import Fixed
from paceline.profiling.rounds import setting_of

if TYPE_CHECKING:
    from paceline.drafting.tree import TokenTree

BAR = Console(stderr=True)
DEPTH = 6
SIGMAS = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 3.0)  # sigma_s, of rounds; sigma_m stays 0.1
Record = list[tuple[int, list[list[float]]]]  # after every token: how many drafted ones are right, signals of each


# -- record --------------------------------------------------------------------------------------------------------
class Watching(Fixed):
    """Drafts DEPTH tokens, and notes what there is to see of each."""

    reads_q = True

    def __init__(self) -> None:
        super().__init__(k=DEPTH)
        self.seen: list[list[float]] = []

    def keep(self, q: torch.Tensor | None, depth: int, hidden: torch.Tensor | None = None) -> bool:
        if depth == 0:
            self.seen = []
        self.seen.append(predictors.signals(q)[:3].tolist())
        return True


class Everywhere(Request):
    """Takes one token a round of a known output, so that a draft begins after every token."""

    def __init__(self, prompt: list[int], output: list[int]) -> None:
        self.watching, self.record, self.whole = Watching(), Record(), prompt + output
        super().__init__(prompt, limit=len(output), policy=self.watching, seed=0)

    def judge(self, tree: TokenTree) -> Outcome:
        follows = self.whole[len(self.ids) :]
        right = 0
        while right < min(tree.drafted, len(follows)) and tree.tokens[right + 1] == follows[right]:
            right += 1
        self.record.append((right, self.watching.seen[: tree.drafted]))
        return Outcome([0], follows[0])


def one_token_a_round(rows: list[Everywhere], trees: list[TokenTree], _: object) -> list[Outcome]:
    return [row.judge(tree) for row, tree in zip(rows, trees, strict=True)]


def record(args: argparse.Namespace) -> None:
    answers, taken = [json.loads(line) for line in args.answers.read_text().splitlines()], Counter[str]()
    llm = paceline.load(args.model, drafter=args.drafter, tier=args.tier)
    setting = setting_of(llm.drafter)
    with args.out.open("w") as file:
        about = {
            "target": setting.target,
            "drafter": setting.drafter,
            "width": setting.width,
            "draft_width": setting.draft_width,
            "predictors": [str(path) for path in setting.predictors],
        }
        file.write(json.dumps(about) + "\n")
        for answer in track(answers, "drafts", console=BAR):
            taken[answer["task"]] += 1
            if args.each is None or taken[answer["task"]] <= args.each:
                row = Everywhere(answer["prompt"], answer["output"])
                with patch("paceline.decoding.engine.verify", one_token_a_round):
                    for _ in llm.engine.run([row]):
                        pass
                file.write(json.dumps({"task": answer["task"], "record": row.record}) + "\n")
                file.flush()


# -- sweep ---------------------------------------------------------------------------------------------------------
def rules() -> list[str]:
    found = [f"fixed:k={k}" for k in (1, 2, 3)] + ["beta-ts:k_max=6"]
    for option in ("", ":learn=false", ":predict=false"):
        found += [f"cali-ts:k_max={DEPTH}{option}:sigma_s={sigma}" for sigma in SIGMAS]
        found.append(f"cali-ts:k_max={DEPTH}{option}:calibrate=false")
    return found


def decide(policy: StoppingPolicy, record: Record, sums: Counter[str]) -> None:
    """One answer under a policy, as `AutoregressiveDrafter.draft` asks it."""
    at = 0
    while at < len(record):
        right, seen = record[at]
        room, depth = len(seen), 0  # near the end less is drafted
        more = room > 0 and policy.more(0)
        while more:
            policy.keep(torch.tensor(seen[depth]), depth)
            depth += 1
            more = depth < room and policy.more(depth)
        accepted = min(right, depth)
        policy.observe(depth, accepted)
        at += accepted + 1
        sums.update(rounds=1, tokens=accepted + 1, drafted=depth, accepted=accepted)


def signals_as_recorded(q: torch.Tensor | None) -> torch.Tensor:
    shown = torch.zeros(1 + predictors.TOP)
    if q is not None:
        shown[: len(q)] = q
    return shown


def measure(rule: str, setting: Setting, records: list[Record], seeds: int, cost: float) -> dict[str, Any]:
    spec, found = POLICIES.parse(rule), []
    for seed in range(1 if rule.startswith("fixed") else seeds):
        sums = Counter[str]()
        for number, one in enumerate(records):
            policy = spec.build()
            policy.seed(1000 * seed + number)
            policy.check(setting)
            decide(policy, one, sums)
        found.append(
            {
                "tau": sums["tokens"] / sums["rounds"],
                "v_d": sums["accepted"] / sums["drafted"],
                "drafted": sums["drafted"] / sums["rounds"],
                "speedup": sums["tokens"] / (sums["rounds"] + cost * sums["drafted"]),
                "rounds": sums["rounds"] / len(records),
            }
        )
    means = {key: mean(one[key] for one in found) for key in found[0]}
    spread = stdev(one["speedup"] for one in found) if len(found) > 1 else 0.0
    return {"rule": rule, **means, "spread": spread, "seeds": len(found)}


def sweep(args: argparse.Namespace) -> None:
    first, *lines = [json.loads(line) for line in args.drafts.read_text().splitlines()]
    setting = Setting(**first | {"predictors": tuple(Path(path) for path in first["predictors"])})
    records = [line["record"] for line in lines]
    with patch.object(predictors, "signals", signals_as_recorded):
        rows = [
            measure(rule, setting, records, args.seeds, args.cost)
            for rule in track(args.rule or rules(), "rules", console=BAR)
        ]
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        result = {"answers": len(records), "cost": args.cost, "depth": DEPTH, "drafter": setting.drafter, "rows": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    table = [["policy", "tau", "v_d", "drafted a round", "rounds an answer", "predicted speedup"]]
    for row in rows:
        figures = [f"{row[key]:.2f}" for key in ("tau", "v_d", "drafted")] + [f"{row['rounds']:.0f}"]
        table.append([f"`{row['rule']}`", *figures, f"{row['speedup']:.3f} ± {row['spread']:.3f}"])
    print(f"{len(records)} answers, {args.seeds} seeds, a drafted token at {args.cost} passes\n\n{markdown(table)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recorded, swept = commands.add_parser("record"), commands.add_parser("sweep")
    recorded.add_argument("--answers", type=Path, required=True)
    recorded.add_argument("--out", type=Path, required=True)
    recorded.add_argument("--each", type=int, help="first answers of each task only")
    recorded.add_argument("--model", default="smollm2-135m")
    recorded.add_argument("--drafter", default="early-exit")
    recorded.add_argument("--tier", default="native")
    swept.add_argument("--drafts", type=Path, required=True, help="what record wrote")
    swept.add_argument("--rule", nargs="+", help="policies; default Cali-TS's parts at every sigma")
    swept.add_argument("--seeds", type=int, default=10)
    swept.add_argument("--cost", type=float, default=0.38, help="of a drafted token, in target passes")
    swept.add_argument("--out", type=Path)
    args = parser.parse_args()
    {"record": record, "sweep": sweep}[args.command](args)


if __name__ == "__main__":
    main()
