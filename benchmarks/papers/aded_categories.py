"""ADED's figure 4b: tokens a pass by MT-Bench's categories, in its paper's form, in ours, and of prompt lookup.

    python benchmarks/papers/aded_categories.py --suite FILE --out categories.json [--limit N]

Categories are the tasks of the suite. The model answers first turns greedily; drafts are replayed over its answers, so
no time enters.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from measured import grid
from trigram_answers import Row, generated
from trigram_replay import Model, measure

from paceline.bench.machine import machine
from paceline.bench.suites import load_suite
from paceline.errors import PacelineError
from paceline.files import whole

PAPER = "trigram:literal=true:order=3:depth=4:budget=24"
METHODS = {
    "the paper's form, no n-grams of the request": f"{PAPER}:adapt=none+fixed:k=4",
    "the paper's form": f"{PAPER}:adapt=output+fixed:k=4",
    "our form": "trigram:search=mcts:depth=4:budget=24+fixed:k=4",
    "`prompt-lookup`": "prompt-lookup:budget=24+fixed:k=24",
}


def table(rows: Iterable[Row]) -> str:
    cells = {}
    for row in rows:
        for task, tau in {"all": row["tau"], **row["tau_by_task"]}.items():
            cells[row["name"], task] = f"{tau:.2f}"
    return grid("drafts", cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", required=True)
    parser.add_argument("--limit", type=int, help="first prompts of each category")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tier", default="auto")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True, help="the numbers, as JSON")
    parser.set_defaults(temperature=0.0, top_p=1.0, seed=0)
    args = parser.parse_args()
    try:
        answers = list(generated(load_suite(args.suite, limit=args.limit), args))
        model = Model(args.model)
        rows = [measure(model, method, answers, None) | {"name": name} for name, method in METHODS.items()]
    except PacelineError as error:
        raise SystemExit(f"error: {error}") from error
    counts = Counter(answer["task"] for answer in answers)
    about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine(), "answers": counts}
    with whole(args.out) as path:
        path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    print(f"{sum(counts.values())} answers of {args.max_new_tokens} tokens\n\n{table(rows)}")


if __name__ == "__main__":
    main()
