"""Markdown tables of a benchmark's results, for the docs.

    python benchmarks/table.py benchmarks/results/foundation [--task overall] [--tasks-of speedup_ar]

One table per temperature, under a line that says what ran where; `--tasks-of METRIC` adds one of that metric by task.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

COLUMNS = {  # head -> key, format
    "tokens/s": ("tokens_per_s", ".1f"),
    "x `ar`": ("speedup_ar", ".2f"),
    "x `hf`": ("speedup_hf", ".2f"),
    "tau": ("tau", ".2f"),
    "v_d": ("v_d", ".2f"),
    "r_d": ("r_d", ".2f"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", default="overall")
    parser.add_argument("--tasks-of", metavar="METRIC")
    options = parser.parse_args()
    config = json.loads((options.folder / "config.json").read_text())
    rows = [json.loads(line) for line in (options.folder / "results.jsonl").read_text().splitlines()]
    print(about(config))
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        here = [row for row in rows if row["temperature"] == temperature]
        print(f"\n{'Greedy' if temperature == 0 else f'Temperature {temperature:g}'}, {here[0]['prompts']} prompts:\n")
        print(overall([row for row in here if row["task"] == options.task]))
        if options.tasks_of:
            print(f"\n`{options.tasks_of}` by task:\n\n{by_task(here, options.tasks_of)}")


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
        lines.append([f"`{row['method']}`", *(shown(row[key], form) for key, form in COLUMNS.values()), *verdicts])
    return markdown(lines)


def by_task(rows: list[dict[str, Any]], metric: str) -> str:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    found = {(row["method"], row["task"]): row[metric] for row in rows}
    methods = dict.fromkeys(row["method"] for row in rows)
    lines = [[f"`{name}`", *(shown(found[name, task], ".2f") for task in tasks)] for name in methods]
    return markdown([["method", *tasks], *lines])


def shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def markdown(lines: list[list[str]]) -> str:
    rule = ["---", *("--:" for _ in lines[0][1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


if __name__ == "__main__":
    main()
