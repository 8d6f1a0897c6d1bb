"""Markdown tables of a benchmark's results, for the docs.

    python benchmarks/table.py benchmarks/results/foundation [--task overall] [--tasks-of speedup_ar] [--split]
    python benchmarks/table.py RESULTS/torch RESULTS/native        # runs of the same methods side by side

One table per temperature, under a line that says what ran where; `--tasks-of METRIC` adds one of that metric by task,
`--split` one of where the seconds go.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.policies import POLICIES
from paceline.registry import split_method

Row = dict[str, Any]  # of results.jsonl

PHASES = {"draft": "drafting", "verify": "verification", "sample": "sampling", "other": "other"}
COLUMNS = {  # head -> key, format
    "tokens/s": ("tokens_per_s", ".1f"),
    "x `ar`": ("speedup_ar", ".2f"),
    "x `hf`": ("speedup_hf", ".2f"),
    "decode x `ar`": ("decode_speedup_ar", ".2f"),
    "tau": ("tau", ".2f"),
    "v_d": ("v_d", ".2f"),
    "r_d": ("r_d", ".2f"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="+")
    parser.add_argument("--task", default="overall")
    parser.add_argument("--tasks-of", metavar="METRIC")
    parser.add_argument("--split", action="store_true", help="where the seconds go, too")
    options = parser.parse_args()
    if len(options.folder) > 1:
        print(side_by_side([read(folder) for folder in options.folder], options.task))
        return
    config, rows = read(options.folder[0])
    print(about(config))
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        here = [row for row in rows if row["temperature"] == temperature]
        print(f"\n{named(temperature)}, {here[0]['prompts']} prompts:\n")
        print(overall([row for row in here if row["task"] == options.task]))
        if options.split:
            print(
                f"\nSeconds by phase, and their share:\n\n{split([row for row in here if row['task'] == options.task])}"
            )
        if options.tasks_of:
            print(f"\n`{options.tasks_of}` by task:\n\n{by_task(here, options.tasks_of)}")


def read(folder: Path) -> tuple[dict[str, Any], list[Row]]:
    """The config and the results of a run that is complete."""
    try:
        config = json.loads((folder / "config.json").read_text())
        return config, [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    except OSError as error:
        raise SystemExit(f"{folder} has no complete results of paceline bench: {error.strerror}") from error


class Method(NamedTuple):
    """A method as the benchmark names it: the drafter with its options, the policy's name and options."""

    drafter: str
    policy: str = ""
    options: dict[str, Any] = {}  # noqa: RUF012  # never changed

    @classmethod
    def of(cls, name: str) -> Method:
        drafter, policy = split_method(name, POLICIES.__contains__)
        if policy is None:
            return cls(drafter)
        return cls(drafter, policy.partition(":")[0], POLICIES.parse(policy).options)

    def option(self, name: str) -> Any:
        """The policy's: as given, or else its default."""
        return self.options.get(name, POLICIES.options(self.policy)[name].default)


def named(temperature: float) -> str:
    return "Greedy" if temperature == 0 else f"Temperature {temperature:g}"


def about(config: dict[str, Any]) -> str:
    settings, machine = config["settings"], config["machine"]
    return (
        f"{config['date'][:10]}, {machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}; "
        f"{settings['model']}, {config['tier']} tier, {config['dtype']}, {settings['max_new_tokens']} new tokens, "
        f"batch {settings['batch']}, seed {settings['seed']}."
    )


def overall(rows: list[dict[str, Any]]) -> str:
    exact = rows[0]["identical"] is not None
    lines = [["method", *COLUMNS, *(["identical/tie/WRONG"] if exact else [])]]
    for row in rows:
        verdicts = [f"{row['identical']}/{row['tie']}/{row['wrong']}"] if exact else []
        lines.append([f"`{row['method']}`", *(shown(row.get(key), form) for key, form in COLUMNS.values()), *verdicts])
    return markdown(lines)


def side_by_side(runs: Sequence[tuple[dict[str, Any], list[Row]]], task: str) -> str:
    """Greedy speeds on several tiers: a row a method, under a line a run that says what ran where."""
    tables = [
        {row["method"]: row for row in rows if (row["task"], row["temperature"]) == (task, 0)} for _, rows in runs
    ]
    columns = dict(list(COLUMNS.items())[:5])
    lines = [["method", *(f"{config['tier']}: {name}" for config, _ in runs for name in columns), "WRONG"]]
    for name in dict.fromkeys(row["method"] for _, rows in runs for row in rows):
        here = [table.get(name) for table in tables]
        figures = [shown(row.get(key), form) if row else "" for row in here for key, form in columns.values()]
        lines.append([f"`{name}`", *figures, str(sum(row["wrong"] or 0 for row in here if row))])
    prompts = runs[0][1][0]["prompts"]
    heads = [f"{about(config)} Greedy, {prompts} prompts." for config, _ in runs]
    return "\n\n".join([*heads, markdown(lines)])


def by_task(rows: list[dict[str, Any]], metric: str) -> str:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    found = {(row["method"], row["task"]): row[metric] for row in rows}
    methods = dict.fromkeys(row["method"] for row in rows)
    lines = [[f"`{name}`", *(shown(found[name, task], ".2f") for task in tasks)] for name in methods]
    return markdown([["method", *tasks], *lines])


def split(rows: Sequence[Row]) -> str:
    lines = [["method", *PHASES.values(), "total"]]
    for row in rows:
        parts = row["split"]
        cells = [f"{parts[name]:.1f} ({parts[name] / row['seconds']:.0%})" if parts else "" for name in PHASES]
        lines.append([f"`{row['method']}`", *cells, f"{row['seconds']:.1f}"])
    return markdown(lines)


def shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def markdown(lines: list[list[str]]) -> str:
    rule = ["---", *("--:" for _ in lines[0][1:])]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in (lines[0], rule, *lines[1:]))
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


if __name__ == "__main__":
    main()
