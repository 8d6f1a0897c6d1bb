"""AdaEDL's comparison, from results of `paceline bench`: tokens/s of fixed lengths, max-confidence and AdaEDL.

    python benchmarks/adaedl.py RESULTS [--task TASK] [--plot PNG]
    python benchmarks/adaedl.py methods [--drafter NAME] [--lambdas]      # for paceline bench --methods

For each drafter, by K_max and temperature (the paper's table 1), and by the initial lambda where methods name one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from table import Method, Row, about, markdown, read, shown

from paceline.bench.methods import AR
from paceline.bench.suites import OVERALL

POLICIES = ("fixed", "max-confidence", "adaedl")  # in the paper's order
K_MAX = (3, 7, 16)
LAMBDAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


def methods(drafter: str, lambdas: bool) -> list[str]:
    """The paper's comparison, or the sweep over the initial lambda."""
    if lambdas:
        return [f"{drafter}+{name}:k_max=7:threshold={value}" for name in POLICIES[1:] for value in LAMBDAS]
    return [AR, *(f"{drafter}+{name}:{'k' if name == 'fixed' else 'k_max'}={k}" for k in K_MAX for name in POLICIES)]


class Point(NamedTuple):
    """A measurement of the comparison."""

    drafter: str
    policy: str
    k_max: int
    threshold: float | None  # initial lambda, where the method names one
    temperature: float
    speed: float  # tokens/s


def points(rows: Iterable[Row]) -> list[Point]:
    found = []
    for row in rows:
        method = Method.of(row["method"])
        if method.policy in POLICIES:
            k = method.option("k" if method.policy == "fixed" else "k_max")
            threshold = method.options.get("threshold")
            found.append(Point(method.drafter, method.policy, k, threshold, row["temperature"], row["tokens_per_s"]))
    return found


def comparison(found: Sequence[Point], plain: dict[float, float]) -> str:
    """tokens/s by K_max, policy and temperature; in brackets the gain over a fixed length of as many tokens."""
    speeds = {(p.policy, p.k_max, p.temperature): p.speed for p in found if p.threshold is None}
    temperatures = list(dict.fromkeys(p.temperature for p in found))
    lines = [["K_max", "policy", *(f"t = {t:g}" for t in temperatures)]]
    if plain:
        lines.append(["", f"`{AR}`", *(f"{plain[t]:.1f}" for t in temperatures)])
    for k in sorted({k for _, k, _ in speeds}):
        for policy in POLICIES:
            cells = [_gain(speeds.get((policy, k, t)), speeds.get(("fixed", k, t))) for t in temperatures]
            lines.append([str(k), f"`{policy}`", *cells])
    return markdown(lines)


def _gain(speed: float | None, over: float | None) -> str:
    gain = f" ({100 * (speed / over - 1):+.0f} %)" if speed and over and speed != over else ""
    return shown(speed, ".1f") + gain


def sweep(found: Sequence[Point]) -> str:
    """tokens/s by initial lambda."""
    speeds = {p[1:5]: p.speed for p in found if p.threshold is not None}
    temperatures = list(dict.fromkeys(p.temperature for p in found))
    lines = [["policy", "K_max", "lambda", *(f"t = {t:g}" for t in temperatures)]]
    for policy, k, value in sorted({key[:3] for key in speeds}):
        cells = [shown(speeds.get((policy, k, value, t)), ".1f") for t in temperatures]
        lines.append([f"`{policy}`", str(k), f"{value:g}", *cells])
    return markdown(lines)


def plot(found: Sequence[Point], plain: dict[float, float], path: Path) -> None:
    """tokens/s over temperature, a panel for each K_max; and over the initial lambda, where there are several."""
    import matplotlib.pyplot as plt

    by_k = [p for p in found if p.threshold is None]
    panels: list[tuple[str, str, dict[str, list[tuple[float, float]]]]] = []
    for k in sorted({p.k_max for p in by_k}):
        lines = {
            name: [(p.temperature, p.speed) for p in by_k if (p.policy, p.k_max) == (name, k)] for name in POLICIES
        }
        panels.append((f"K_max = {k}", "temperature", lines | {AR: list(plain.items())}))
    lines = {}
    for p in found:
        if p.threshold is not None:
            lines.setdefault(f"{p.policy}, t = {p.temperature:g}", []).append((p.threshold, p.speed))
    if lines:
        panels.append(("initial lambda", "lambda", lines))
    figure, places = plt.subplots(1, len(panels), figsize=(4.5 * len(panels), 4), squeeze=False, layout="constrained")
    for axes, (title, label, curves) in zip(places[0], panels, strict=True):
        for name, curve in curves.items():
            if curve:
                axes.plot(*zip(*sorted(curve), strict=True), "k--" if name == AR else "o-", label=name)
        axes.set(title=title, xlabel=label, ylabel="tokens/s", ylim=(0, None))
        axes.legend(fontsize="small")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="RESULTS", help="of paceline bench; or: methods")
    parser.add_argument("--task", default=OVERALL)
    parser.add_argument("--plot", type=Path, help="a picture too, of the first drafter")
    parser.add_argument("--drafter", default="early-exit", help="of methods")
    parser.add_argument("--lambdas", action="store_true", help="methods: those of the sweep")
    args = parser.parse_args()
    if args.folder == "methods":
        print(",".join(methods(args.drafter, args.lambdas)))
        return
    config, rows = read(Path(args.folder))
    rows = [row for row in rows if row["task"] == args.task]
    if not rows:
        parser.error(f"{args.folder} has no task {args.task}")
    found, plain = points(rows), {row["temperature"]: row["tokens_per_s"] for row in rows if row["method"] == AR}
    print(about(config))
    drafters = list(dict.fromkeys(point.drafter for point in found if point.policy != "fixed"))
    if not drafters:
        parser.error(f"{args.folder} has nothing to compare with a fixed length")
    for drafter in drafters:
        here = [point for point in found if point.drafter == drafter]
        print(f"\n`{drafter}`, {args.task}, tokens/s (over a fixed length of K_max):\n\n{comparison(here, plain)}")
        if any(point.threshold is not None for point in here):
            print(f"\nBy the initial lambda:\n\n{sweep(here)}")
    if args.plot:
        plot([point for point in found if point.drafter == drafters[0]], plain, args.plot)


if __name__ == "__main__":
    main()
