"""Tables of EESD in its paper's form, from results of `paceline bench`, as Markdown.

    python benchmarks/early_exit.py RESULTS [--task TASK …]
    python benchmarks/early_exit.py methods [--drafter NAME]      # for paceline bench --methods

For each temperature: the speedup over plain decoding, with HM, by task (the paper's tables 1 and 2); v_d, r_d, HM,
seconds and tokens/s (8 to 10); where the seconds go (11); the speedup that equation 14 predicts beside the measured
one; and each drafter's best fixed K, with what the other policies make of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from table import Method, Row, about, markdown, named, read, shown, split

from paceline.bench.methods import AR

FIXED = [f"fixed:k={k}" for k in range(1, 11)]
THOMPSON = ["beta-ts", "cali-ts", "beta-ts:cost=auto", "cali-ts:cost=auto"]


def tables(rows: Sequence[Row], tasks: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Titles and tables, for the rows of one temperature."""
    names, found = list(dict.fromkeys(row["method"] for row in rows)), {(r["method"], r["task"]): r for r in rows}
    lines = [[f"`{name}`", *(_speedup(found[name, task]) for task in tasks)] for name in names]
    yield "Speedup over `ar`, and HM in %", markdown([["method", *tasks], *lines])
    for task in tasks:
        here = [found[name, task] for name in names]
        yield f"{task}: acceptance and speed", acceptance(here)
        yield f"{task}: seconds by phase, and their share", split(here)
        yield f"{task}: speedup predicted by eq. 14, and measured", predicted(here)
    if lengths := best_lengths(found, names, tasks):
        yield "The best fixed K, and speeds relative to it", lengths


def _speedup(row: Row) -> str:
    return shown(row["speedup_ar"], ".2f") + (f" ({row['hm']:.0f})" if row["hm"] is not None else "")


def acceptance(rows: Sequence[Row]) -> str:
    head = ["method", "v_d", "r_d", "HM", "tau", "seconds a prompt", "tokens/s", "speedup"]
    lines = []
    for row in rows:
        shares = [shown(row["v_d"], ".2f"), shown(row["r_d"], ".2f"), shown(row["hm"], ".1f"), shown(row["tau"], ".2f")]
        speeds = [
            f"{row['seconds'] / row['prompts']:.2f}",
            f"{row['tokens_per_s']:.1f}",
            shown(row["speedup_ar"], ".2f"),
        ]
        lines.append([f"`{row['method']}`", *shares, *speeds])
    return markdown([head, *lines])


def predicted(rows: Sequence[Row]) -> str:
    lines = [["method", "predicted", "measured", "measured / predicted"]]
    for row in rows:
        if row["predicted_speedup"] is not None:
            told, seen = row["predicted_speedup"], row["speedup_ar"]
            lines.append([f"`{row['method']}`", f"{told:.2f}", f"{seen:.2f}", f"{seen / told:.2f}"])
    return markdown(lines)


def best_lengths(found: dict[tuple[str, str], Row], names: Sequence[str], tasks: Sequence[str]) -> str | None:
    """For each drafter with fixed lengths: the fastest of these by task, and the other policies' tokens/s over its."""
    lines = [["method", *tasks]]
    made = {name: Method.of(name) for name in names}
    for drafter in dict.fromkeys(method.drafter for method in made.values() if method.policy == "fixed"):
        fixed = [name for name in names if made[name].drafter == drafter and made[name].policy == "fixed"]
        best = {task: max((found[name, task] for name in fixed), key=lambda row: row["tokens_per_s"]) for task in tasks}
        cells = [f"{shown(r['speedup_ar'], '.2f')} (K = {Method.of(r['method']).option('k')})" for r in best.values()]
        lines.append([f"`{drafter}+fixed`", *cells])
        for name in names:
            if made[name].drafter == drafter and name not in fixed:
                ratios = [found[name, task]["tokens_per_s"] / best[task]["tokens_per_s"] for task in tasks]
                lines.append([f"`{name}`", *(f"{ratio:.3f}" for ratio in ratios)])
    return markdown(lines) if len(lines) > 1 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="RESULTS", help="of paceline bench; or: methods")
    parser.add_argument("--task", action="append", help="only these; default all, and each in the tables by task")
    parser.add_argument("--drafter", default="early-exit", help="of methods")
    args = parser.parse_args()
    if args.folder == "methods":
        print(",".join([AR, *(f"{args.drafter}+{policy}" for policy in FIXED + THOMPSON)]))
        return
    config, rows = read(Path(args.folder))
    print(about(config))
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        here = [row for row in rows if row["temperature"] == temperature]
        print(f"\n## {named(temperature)}, {here[0]['prompts']} prompts")
        tasks = dict.fromkeys(row["task"] for row in here)
        if unknown := set(args.task or ()) - set(tasks):
            parser.error(f"there is no task {', '.join(unknown)}; there are {', '.join(tasks)}")
        for title, table in tables(here, args.task or list(tasks)):
            print(f"\n{title}:\n\n{table}")


if __name__ == "__main__":
    main()
