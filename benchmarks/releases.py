"""The headline figures of each release: rows of JSON lines, a table and a plot of them.

    python benchmarks/releases.py add benchmarks/results/readme      # a release's README table becomes its row
    python benchmarks/releases.py table                              # Markdown, for docs/history.md
    python benchmarks/releases.py plot                               # docs/images/history.svg

A row has ratios of speed by tier and method, all of one run by turns: against plain decoding (`"against": "ar"`) in
`benchmarks/history/releases.jsonl`, against another commit's same method in what `make bench-quick` prints. Speeds
themselves are left out: only ratios of one run compare from machine to machine, and these only roughly.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import table

from paceline.bench.machine import machine
from paceline.bench.methods import AR, is_baseline
from paceline.bench.suites import OVERALL

ROOT = Path(__file__).parents[1]
RELEASES = ROOT / "benchmarks" / "history" / "releases.jsonl"
PLOT = ROOT / "docs" / "images" / "history.svg"
TIERS = ("torch", "native")
MACHINE = ("cpu", "cores", "threads", "torch", "transformers")  # of what `machine` says

Row = dict[str, Any]
Ratios = Mapping[str, Mapping[str, float]]  # by tier and method


def new_row(release: str, against: str, about: Mapping[str, Any], where: Mapping[str, Any], ratios: Ratios) -> Row:
    """A row.

    Args:
        release: a version, or what the working tree is called.
        against: what the speeds are divided by: plain decoding, `ar`, or a commit.
        about: date, model, suite, number of prompts and of new tokens; where more is kept.
        where: what `paceline.bench.machine` says.
    """
    rounded = {tier: {method: round(ratio, 3) for method, ratio in own.items()} for tier, own in ratios.items()}
    kept = {key: where[key] for key in MACHINE}
    return {"release": release, "against": against, **about, "machine": kept, "ratios": rounded}


def of_results(folder: Path) -> Row:
    """A release's row from greedy results of `paceline bench` by tier, as `benchmarks/readme_table.sh` leaves them."""
    found = {tier: table.read(folder / tier) for tier in TIERS}
    configs = [config for config, _ in found.values()]
    settings, where = configs[0]["settings"], configs[0]["machine"]
    versions = {config["machine"]["paceline"] for config in configs}
    if len(versions) > 1:
        raise SystemExit(f"{folder}: its tiers are of different versions, {' and '.join(sorted(versions))}")
    ratios = {
        tier: {
            row["method"]: row["speedup_ar"]
            for row in rows
            if (row["task"], row["temperature"]) == (OVERALL, 0) and row["method"] != AR
        }
        for tier, (_, rows) in found.items()
    }
    about = {
        "date": configs[0]["date"][:10],
        "model": settings["model"],
        "suite": settings["suite"],
        "prompts": settings["prompts"],
        "max_new_tokens": settings["max_new_tokens"],
        "source": str(folder.resolve().relative_to(ROOT)) if folder.resolve().is_relative_to(ROOT) else str(folder),
    }
    return new_row(versions.pop(), AR, about, where, ratios)


def of_comparison(args: argparse.Namespace, prompts: int, ratios: Ratios) -> Row:
    """The row of two checkouts compared by `against.py`, given its options."""
    release, against = args.names
    suite = args.prompts.resolve()
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "model": args.model,
        "suite": str(suite.relative_to(ROOT)) if suite.is_relative_to(ROOT) else str(suite),
        "prompts": prompts,
        "max_new_tokens": args.tokens,
    }
    return new_row(release, against, about, machine(), ratios)


def read(path: Path = RELEASES) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def append(row: Row, path: Path) -> None:
    """One line, at the end. Raises SystemExit where the file cannot be written, and for a release that is there."""
    known = read(path) if path.exists() else []
    if row["against"] == AR and row["release"] in (old["release"] for old in known):
        raise SystemExit(f"{path} has a row of {row['release']} already")
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise SystemExit(f"cannot write {path}: {error.strerror}") from error


def markdown(rows: Sequence[Row]) -> str:
    """A table: a row a release, tier and machine, a column a method."""
    methods = list(dict.fromkeys(m for row in rows for own in row["ratios"].values() for m in own))
    lines = [["release", "tier", "machine", *(f"`{method}`" for method in methods)]]
    for row in rows:
        where = f"{row['date']}, {row['machine']['cpu']}, {row['machine']['threads']} threads"
        for tier, own in row["ratios"].items():
            figures = [f"{own[method]:.2f}" if method in own else "" for method in methods]
            lines.append([row["release"], tier, where, *figures])
    return table.markdown(lines)


def plot(rows: Sequence[Row], path: Path) -> None:
    """A panel a tier, a line a method, a place a release and machine; the same rows give the same file."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "paceline"
    figure, panels = plt.subplots(1, len(TIERS), figsize=(9, 4), layout="constrained", sharey=True)
    names = [f"{row['release']}\n{row['machine']['cpu']}" for row in rows]
    methods = list(dict.fromkeys(m for row in rows for own in row["ratios"].values() for m in own))
    for tier, axes in zip(TIERS, panels, strict=True):
        by_release = [row["ratios"].get(tier, {}) for row in rows]
        for colour, method in enumerate(method for method in methods if not is_baseline(method)):
            if own := [(at, ratios[method]) for at, ratios in enumerate(by_release) if method in ratios]:
                axes.plot(*zip(*own, strict=True), f"C{colour}", marker="o", label=method)
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set(title=f"{tier} tier", xticks=range(len(rows)), xticklabels=names, xlim=(-0.5, len(rows) - 0.5))
        axes.legend(fontsize="small")
    panels[0].set_ylabel("speed of plain decoding = 1")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["add", "table", "plot"])
    parser.add_argument("folder", type=Path, nargs="?", help="add: of results by tier")
    parser.add_argument("--rows", type=Path, default=RELEASES)
    parser.add_argument("--out", type=Path, default=PLOT, help="plot: an SVG file")
    args = parser.parse_args()
    if args.what == "add":
        if args.folder is None:
            parser.error("name the folder of the results, as in: releases.py add benchmarks/results/readme")
        append(of_results(args.folder), args.rows)
    elif not args.rows.exists():
        sys.exit(f"there is no {args.rows}")
    elif args.what == "table":
        print(markdown(read(args.rows)))
    else:
        plot(read(args.rows), args.out)


if __name__ == "__main__":
    main()
