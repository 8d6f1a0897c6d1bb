"""Results and a table of a field run's requests; of one that was interrupted, too.

python benchmarks/field/summary.py RESULTS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

CONFIG, RUNS, RESULTS, TABLE = "config.json", "runs.jsonl", "results.jsonl", "table.md"
OVERALL = "overall"
PLAIN = "transformers:plain"
Row = dict[str, Any]


def method(peer: str, mode: str) -> str:
    return f"{peer}:{mode}"


def summarise(folder: Path) -> str:
    """Writes `results.jsonl`, an object a method, task and temperature, and `table.md`, which is returned.

    Raises:
        SystemExit: with a line for the user, where the folder has no requests of a field run, or damaged ones.
    """
    try:
        config = json.loads((folder / CONFIG).read_text())
        runs = [json.loads(line) for line in (folder / RUNS).read_text().splitlines()]
    except OSError as error:
        raise SystemExit(f"{folder} has no requests of a field run: {error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise SystemExit(f"{folder} has a damaged {CONFIG} or {RUNS}: {error}") from error
    try:
        rows = list(results(runs, config))
        text = tables(rows, config)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise SystemExit(f"{folder} has a {CONFIG} or {RUNS} that is none of a field run's: {why}") from error
    (folder / RESULTS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / TABLE).write_text(text)
    return text


def results(runs: Sequence[Row], config: Row) -> Iterator[Row]:
    """A row a method, task and temperature: `tau` is tokens a target pass, None where passes are not known.

    `identical` and `different` count greedy outputs against those of `reference`; `error` says how it failed,
    `answered` how often it did not. Speeds are of the answered prompts, as is what they are relative to.
    """
    eos = set(config["eos"])
    found = {(run["method"], run["temperature"], run["id"]): run for run in runs}
    tasks = list(dict.fromkeys(run["task"] for run in runs))
    for temperature in config["settings"]["temperatures"]:
        for name in config["methods"]:
            for task in (OVERALL, *tasks):
                own = [
                    run
                    for (of, at, _), run in found.items()
                    if (of, at) == (name, temperature) and task in (OVERALL, run["task"])
                ]
                yield _result(name, temperature, task, own, found, config, eos)


def _result(
    name: str, temperature: float, task: str, own: Sequence[Row], found: dict[Any, Row], config: Row, eos: set[int]
) -> Row:
    good = [run for run in own if "error" not in run]
    reference = config["references"][name]
    pairs = [(run, other) for run in good if (other := found.get((PLAIN, temperature, run["id"]))) and "ids" in other]
    speed = _speed(good, eos)
    row: Row = {"method": name, "task": task, "temperature": temperature, "batch": 1, "prompts": len(own)}
    row |= {"answered": len(good), "tokens": sum(_length(run, eos) for run in good)}
    row |= {"seconds": sum(run["seconds"] for run in good), "tokens_per_s": speed}
    base = _speed([other for _, other in pairs], eos)
    row["speedup_hf"] = speed / base if speed and base and len(pairs) == len(good) else None
    counted = bool(good) and all(run.get("passes") for run in good)
    row["tau"] = row["tokens"] / sum(run["passes"] for run in good) if counted else None
    row |= {"reference": reference, "identical": None, "different": None}
    if temperature == 0:
        known = [(run, other) for run in good if "ids" in (other := found.get((reference, 0, run["id"]), {}))]
        row["identical"] = sum(_cut(run["ids"], eos) == _cut(other["ids"], eos) for run, other in known)
        row["different"] = len(known) - row["identical"]
    error = next((run["error"] for run in own if "error" in run), None) or config["failed"].get(
        f"{temperature:g}", {}
    ).get(name)
    return {**row, "error": error}


def _cut(ids: Sequence[int], eos: set[int]) -> list[int]:
    """Without the end-of-sequence token, which some tell and others do not."""
    end = next((at for at, token in enumerate(ids) if token in eos), len(ids))
    return list(ids[:end])


def _length(run: Row, eos: set[int]) -> int:
    return len(_cut(run["ids"], eos))


def _speed(runs: Iterable[Row], eos: set[int]) -> float | None:
    chosen = list(runs)
    seconds = sum(run["seconds"] for run in chosen)
    return sum(_length(run, eos) for run in chosen) / seconds if seconds else None


def tables(rows: Sequence[Row], config: Row) -> str:
    """In Markdown: a table a temperature, under a line that says what ran where."""
    tasks = [task for task in dict.fromkeys(row["task"] for row in rows) if task != OVERALL]
    settings, machine = config["settings"], config["machine"]
    parts = [
        f"{config['date'][:10]}, {machine['cpu']}, {settings['threads']} threads; {settings['model']}, "
        f"{settings['max_new_tokens']} new tokens at most, seed {settings['seed']}.",
        f"`{config['command']}`",
    ]
    for temperature in config["settings"]["temperatures"]:
        here = {(row["method"], row["task"]): row for row in rows if row["temperature"] == temperature}
        prompts = max((row["prompts"] for row in here.values()), default=0)
        parts.append(f"{f'Temperature {temperature:g}' if temperature else 'Greedy'}, {prompts} prompts:")
        head = ["engine", "tokens/s", "x transformers", "tokens a pass", "same ids", *tasks, "failed"]
        lines = [head, ["---", *("--:" for _ in head[2:]), "---"]]
        lines += [_line(name, here, tasks) for name in config["methods"]]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts) + "\n"


def _line(name: str, here: dict[tuple[str, str], Row], tasks: Sequence[str]) -> list[str]:
    row = here[name, OVERALL]
    same = "" if row["identical"] is None or not row["answered"] else f"{row['identical']} of {_held(row)}"
    speeds = [_shown(here[name, task]["tokens_per_s"], ".1f") for task in tasks]
    cells = [_shown(row["tokens_per_s"], ".1f"), _shown(row["speedup_hf"], ".2f"), _shown(row["tau"], ".2f"), same]
    why = (row["error"] or "").replace("|", "\\|")
    if row["error"] and row["answered"]:
        why = f"{row['prompts'] - row['answered']} of {row['prompts']}: {why}"
    return [f"`{name}`", *cells, *speeds, why]


def _held(row: Row) -> int:
    return int(row["identical"] + row["different"])


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("name the folder of results")
    print(summarise(Path(sys.argv[1])))
