"""AdaEDL's figures 1 and 7: how many tokens of a draft of fixed length are accepted, as a histogram.

    python benchmarks/papers/adaedl_accepted_lengths.py --suite FILE --out RESULTS [--drafter early-exit] [--plot PNG]

Drafts of 3, 7 and 16 tokens at temperature 1, by task. Counts depend on nothing but the tokens; rounds that the end of
an output cut short are left out. RESULTS gets `lengths.json` beside what `paceline bench` writes.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from measured import measured, options
from table import markdown

from paceline.bench.journal import RUNS
from paceline.files import whole

LENGTHS = (3, 7, 16)


class Histogram(NamedTuple):
    """Of drafts of `drafted` tokens over one task: `rounds[a]` had `a` of them accepted."""

    task: str
    drafted: int
    rounds: list[int]

    @property
    def mean(self) -> float:
        return sum(a * count for a, count in enumerate(self.rounds)) / sum(self.rounds)

    @property
    def deviation(self) -> float:
        squares = sum(a * a * count for a, count in enumerate(self.rounds)) / sum(self.rounds)
        return math.sqrt(max(squares - self.mean**2, 0.0))

    @property
    def shares(self) -> list[float]:
        """In %."""
        return [100 * count / sum(self.rounds) for count in self.rounds]


def histograms(runs: Iterable[dict[str, Any]]) -> list[Histogram]:
    """Of the lines of `runs.jsonl`, in which a round is drafted, depth, accepted, emitted."""
    found: dict[tuple[str, int], Counter[int]] = {}
    for run in runs:
        drafted = int(run["method"].rpartition("=")[2])
        counts = found.setdefault((run["task"], drafted), Counter())
        counts.update(one[2] for rounds in run["rounds"] for one in rounds if one[0] == drafted and one[3] > one[2])
    return [
        Histogram(task, drafted, [counts[a] for a in range(drafted + 1)])
        for (task, drafted), counts in sorted(found.items())
        if counts
    ]


def table(found: Iterable[Histogram]) -> str:
    lines = [["task", "drafted", "rounds", "mean accepted", "standard deviation", "none", "all"]]
    for one in found:
        ends = [f"{share:.1f} %" for share in (one.shares[0], one.shares[-1])]
        figures = [f"{one.mean:.2f}", f"{one.deviation:.2f}", *ends]
        lines.append([one.task, str(one.drafted), str(sum(one.rounds)), *figures])
    return markdown(lines)


def plot(found: Iterable[Histogram], path: Path) -> None:
    """A panel a task, lines by draft length."""
    import matplotlib.pyplot as plt

    tasks = {task: [one for one in found if one.task == task] for task in dict.fromkeys(one.task for one in found)}
    figure, places = plt.subplots(1, len(tasks), figsize=(4.5 * len(tasks), 3.5), squeeze=False, layout="constrained")
    for axes, (task, own) in zip(places[0], tasks.items(), strict=True):
        for one in own:
            axes.plot(one.shares, "o-", label=f"{one.drafted} drafted")
        axes.set(title=task, xlabel="accepted tokens of a draft", ylabel="% of drafts", ylim=(0, None))
        axes.legend(fontsize="small")
    figure.savefig(path)


def main() -> None:
    parser = options(__doc__, temperature=1.0)
    parser.add_argument("--drafter", default="early-exit")
    parser.add_argument("--plot", type=Path, help="a picture too")
    args = parser.parse_args()
    measured(args, [f"{args.drafter}+fixed:k={length}" for length in LENGTHS])
    found = histograms(map(json.loads, (args.out / RUNS).read_text().splitlines()))
    told = [one._asdict() | {"mean": one.mean, "deviation": one.deviation, "shares": one.shares} for one in found]
    with whole(args.out / "lengths.json") as path:
        path.write_text(json.dumps({"drafter": args.drafter, "histograms": told}, indent=1) + "\n")
    print(f"\n{table(found)}")
    if args.plot:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
