"""Tokens a pass of drafters that need only tokens, without the model: they are walked over answers that it gave before.

    python benchmarks/trigram_replay.py ABLATION --answers FILE [--answers FILE …] [--matrix DIR] [--plot PNG]
    python benchmarks/trigram_replay.py methods --methods 'suffix:budget=8,trigram:budget=8' --answers FILE
    python benchmarks/trigram_replay.py show RESULT

Ablations of ADED: `adaptation` (over output position), `iterations`, `search`, `order` (wants a matrix of 4-grams),
`corpus` (builds matrices of shares of `--corpus`), `exploration` (C1 and C2), `budget` (tree sizes) and `sampling` (one
file of answers for each temperature and top-p). Answers come from `trigram_answers.py`. With `--costs`, a profile that
`paceline profile` stored (or `widths.json` of `target_pass.py`, of which `--tier` is taken), `budget=auto` works, and
the speedup over plain decoding is told as the profile predicts it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from paceline.api import parse_method
from paceline.bench.machine import machine
from paceline.drafters.trigram.build import build
from paceline.drafting.corpus.tokenized import tokenizer_of
from paceline.profiling.replay import replay
from paceline.targets.cost_model import Costs
from paceline.targets.costs import set_costs
from paceline.targets.store import sha256

RESULTS = Path(__file__).parent / "results" / "trigram"
BIN = 16  # output tokens that are told of together
Row = dict[str, Any]


class Model:
    """What drafters ask of a target, without its weights."""

    tier, num_layers = "torch", 0  # `trigram` drafts the same on all tiers; nobody looks at hidden states

    def __init__(self, name: str) -> None:
        self.tokenizer, source = tokenizer_of(name)
        self.name, self.vocab_size, self.device = source.key, len(self.tokenizer), torch.device("cpu")


def measure(model: Model, method: str, answers: Sequence[Row], costs: Costs | None) -> Row:
    """Tokens a pass: over all answers, by task, and by position in the output; with costs, the speedup they predict."""
    spec, policy = parse_method(method)
    drafter = spec.build(model)
    tasks, bins = defaultdict(lambda: [0, 0]), defaultdict(lambda: [0, 0])
    drafted, seconds, plain, predicted = 0, 0.0, list[float](), list[float]()
    for answer in answers:
        stats, position = replay(drafter, answer["prompt"], answer["output"], policy.build()), 0
        for one in stats.rounds:
            for counts in (tasks[answer["task"]], bins[position // BIN * BIN]):
                counts[0] += one.emitted
                counts[1] += 1
            position += one.emitted
            drafted += one.drafted
            seconds += one.seconds["draft"] + one.seconds["other"]
        if costs:
            plain.append(stats.tokens * costs(1))
            predicted.append(sum(costs(one.drafted + 1) for one in stats.rounds))
    tokens, rounds = (sum(counts[i] for counts in tasks.values()) for i in (0, 1))
    return {
        "method": method,
        "tau": tokens / rounds,
        "tau_by_task": {task: counts[0] / counts[1] for task, counts in tasks.items()},
        "tau_by_position": {place: counts[0] / counts[1] for place, counts in sorted(bins.items())},
        "drafted": drafted / rounds,
        "microseconds": 1e6 * seconds / rounds,
        "rounds": rounds,
    } | (
        {
            "speedup": sum(plain) / sum(predicted),
            "speedup_by_task": {
                task: sum(a for a, answer in zip(plain, answers, strict=True) if answer["task"] == task)
                / sum(b for b, answer in zip(predicted, answers, strict=True) if answer["task"] == task)
                for task in tasks
            },
            "speedup_of_slowest_answer": min(a / b for a, b in zip(plain, predicted, strict=True)),
        }
        if costs
        else {}
    )


# -- ablations -----------------------------------------------------------------------------------------------------
def trigram(args: argparse.Namespace, **options: object) -> str:
    """The paper's settings, 24 candidates of 4 tokens from trigrams, but for `options`; 96 nodes hold them all."""
    chosen = {"matrix": args.matrix, "order": 3, "budget": 96, "candidates": 24, "depth": 4} | options
    return ":".join(["trigram", *(f"{name}={str(value).lower()}" for name, value in chosen.items())])


FORMS: list[dict[str, object]] = [{"search": "mcts"}, {"literal": True}]  # ours and the paper's


def methods(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """What the ablation compares, and what it is called in the table."""
    kind = args.ablation
    if kind == "methods":
        yield from ((name, name) for name in args.methods.split(","))
    elif kind == "adaptation":
        for adapt in ("none", "output", "prompt"):
            for form in FORMS:
                yield trigram(args, adapt=adapt, **form), f"adapt={adapt} {named(form)}"
    elif kind == "iterations":
        for form in FORMS:
            for count in (10, 20, 40, 75, 150, 300):
                yield trigram(args, iterations=count, **form), f"iterations={count} {named(form)}"
    elif kind == "search":
        for budget in (4, 24, 96):
            for form in ({"search": "greedy"}, {"search": "topk"}, *FORMS):
                yield trigram(args, budget=budget, **form), f"{named(form)} budget={budget}"
    elif kind == "order":
        for order in (2, 3, 4):
            for form in ({"search": "greedy"}, *FORMS):
                yield trigram(args, order=order, **form), f"n={order} {named(form)}"
    elif kind == "exploration":
        for form in FORMS:
            for c1 in (0.1, 0.5, 2.414, 8, 32, 128):
                yield trigram(args, c1=c1, **form), f"C1={c1} C2=8 {named(form)}"
            for inverse in (0.001, 0.01, 0.125, 1, 10):
                yield trigram(args, c2=1 / inverse, **form), f"C1=32 1/C2={inverse} {named(form)}"
    elif kind == "budget":
        for budget in (1, 2, 4, 8, 16, 24, 32, 48, 64):
            yield trigram(args, budget=budget, search="greedy"), f"trigram budget={budget}"
            for other in args.others.split(",") if args.others else ():
                name, _, options = other.partition(":")
                yield f"{name}:budget={budget}{':' * bool(options)}{options}", f"{name} budget={budget}"
    else:  # sampling
        for adapt in ("none", "prompt"):
            yield trigram(args, adapt=adapt, search="greedy"), f"adapt={adapt}"


def named(form: dict[str, object]) -> str:
    return "the paper's" if "literal" in form else str(form["search"])


def corpus_rows(model: Model, args: argparse.Namespace, answers: Sequence[Row], costs: Costs | None) -> Iterator[Row]:
    """A matrix of every n-th line of the corpus, for growing shares of it."""
    for every in (64, 16, 4, 1):
        with tempfile.TemporaryDirectory() as folder:
            parts = share_of(args.corpus, every, Path(folder))
            built = build(model.tokenizer, parts, Path(folder) / "matrix")
            args.matrix = str(Path(folder) / "matrix")
            for adapt in ("none", "prompt"):
                row = measure(model, trigram(args, search="greedy", adapt=adapt), answers, costs)
                size = {"corpus_tokens": built.tokens, "bytes": built.bytes, "ngrams": built.ngrams}
                method = row["method"].replace(args.matrix, "built")
                yield row | size | {"name": f"{built.tokens} tokens adapt={adapt}", "method": method}


def share_of(corpus: Sequence[Path], every: int, folder: Path) -> list[Path]:
    """Files in `folder` with every n-th line of each of the corpus."""
    parts = []
    for index, path in enumerate(corpus):
        parts.append(folder / f"{index}-{path.name.removesuffix('.gz')}")
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            parts[-1].write_text("".join(islice(file, None, None, every)), encoding="utf-8")
    return parts


# -- the program ---------------------------------------------------------------------------------------------------
def run(args: argparse.Namespace) -> dict[str, Any]:
    model, costs = Model(args.model), None
    if args.costs:
        costs = stored(args.costs, args.tier)
        set_costs(model, costs)  # type: ignore[arg-type]
    files = {path: [json.loads(line) for line in path.read_text().splitlines()] for path in args.answers}
    groups = {f"{path.stem} ": answers for path, answers in files.items()}
    if args.ablation != "sampling":
        groups = {"": [answer for answers in files.values() for answer in answers]}
    rows: list[Row] = []
    for group, answers in groups.items():
        if args.ablation == "corpus":
            rows += corpus_rows(model, args, answers, costs)
            continue
        for method, name in track(list(methods(args)), group or args.ablation):
            settings = {key: answers[0][key] for key in ("temperature", "top_p")}
            rows.append(measure(model, method, answers, costs) | settings | {"name": group + name})
    return {
        "ablation": args.ablation,
        "model": args.model,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "answers": [{"file": p.name, "sha256": sha256(p), "answers": len(files[p])} for p in args.answers],
        "costs": str(args.costs.name) if args.costs else None,
        "rows": rows,
    }


def stored(path: Path, tier: str) -> Costs:
    """What passes cost, by width: `paceline profile` keeps one tier a file, `target_pass.py` all of them in a list."""
    passes = json.loads(path.read_text())["passes"]
    if isinstance(passes, dict):
        return Costs({int(width): timing["median"] for width, timing in passes.items()})
    return Costs({one["width"]: one["median_ms"] / 1e3 for one in passes if one["tier"] == tier})


def show(result: dict[str, Any]) -> None:
    tasks = list(dict.fromkeys(task for row in result["rows"] for task in row["tau_by_task"]))
    table = Table(title=f"{result['ablation']}: tokens a pass", box=None, padding=(0, 1))
    for title in ("", "tau", *tasks, "drafted", "µs a round", *(["speedup", "slowest"] if result["costs"] else [])):
        table.add_column(title, justify="right" if title else "left")
    for row in result["rows"]:
        values = [row["tau"], *(row["tau_by_task"].get(task, float("nan")) for task in tasks)]
        numbers = [f"{value:.2f}" for value in values] + [f"{row['drafted']:.1f}", f"{row['microseconds']:.0f}"]
        if result["costs"]:
            numbers += [f"{row[key]:.2f}" for key in ("speedup", "speedup_of_slowest_answer")]
        table.add_row(row["name"], *numbers)
    Console(highlight=False, width=max(Console().width, 100 + 8 * len(tasks))).print(table)


def plot(result: dict[str, Any], path: Path) -> None:
    """Tokens a pass over position in the output, or a bar for each row."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    if result["ablation"] == "adaptation":
        for row in result["rows"]:
            places = [int(place) for place in row["tau_by_position"]]
            axes.plot(places, list(row["tau_by_position"].values()), label=row["name"])
        axes.set_xlabel("position in the output, tokens")
        axes.set_ylabel("tokens a pass")
        axes.legend()
    else:
        names = [row["name"] for row in result["rows"]]
        axes.barh(names[::-1], [row["tau"] for row in result["rows"]][::-1])
        axes.set_xlabel("tokens a pass")
    figure.savefig(path)


def main() -> None:
    kinds = ("adaptation", "iterations", "search", "order", "corpus", "exploration", "budget", "sampling", "methods")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ablation", choices=[*kinds, "show"])
    parser.add_argument("result", type=Path, nargs="?", help="to show again")
    parser.add_argument("--answers", type=Path, action="append", default=[])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--matrix", default="auto")
    parser.add_argument("--corpus", type=Path, action="append", default=[], help="JSONL, .gz or not")
    parser.add_argument("--methods", help="for methods: to compare, separated by commas")
    parser.add_argument("--others", default="suffix,prompt-lookup", help="for budget: drafters to set beside")
    parser.add_argument("--costs", type=Path, help="a stored profile")
    parser.add_argument("--tier", default="native", help="of the costs, where the file has several")
    parser.add_argument("--out", type=Path, help="default benchmarks/results/trigram/ABLATION.json")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.ablation == "show":
        result = json.loads(args.result.read_text())
    else:
        result = run(args)
        out = args.out or RESULTS / f"{args.ablation}.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
    show(result)
    if args.plot:
        plot(result, args.plot)


if __name__ == "__main__":
    main()
