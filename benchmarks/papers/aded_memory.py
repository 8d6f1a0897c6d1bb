"""ADED's table 3: what each way to draft needs beside the target, in memory and in passes of a model.

    python benchmarks/papers/aded_memory.py --out memory.json [--methods M,M,…] [--repeats 3]

Each figure is the peak resident memory of a process of its own that decodes one prompt (as in benchmarks/memory.py),
less that of plain decoding; of several, the least. Pages of mapped files count while they are resident.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from memory import spawn

# Nothing large here: a child's peak counts from its parent's memory at the start.

METHODS = "prompt-lookup,suffix,recycling,lookahead,trigram,medusa,eagle,early-exit,layer-skip"
PLAIN, NEW = "none", 128
PROMPT = "Write a short story about a river, a bridge and two friends who meet there."
RUNS_MODEL = {  # what a draft runs of a neural network
    **dict.fromkeys(("prompt-lookup", "suffix", "recycling", "trigram", "rest"), "nothing"),
    "lookahead": "the target, over a wider pass",
    "medusa": "its heads",
    "eagle": "its head",
    "early-exit": "layers of the target, and its head",
    "layer-skip": "most layers of the target",
    "draft-model": "a model of its own",
}


def peak(method: str, model: str, tier: str, repeats: int) -> tuple[dict[str, Any], int]:
    """What a child tells of the method, and the least of its peaks in bytes."""
    runs = [spawn(method, model, tier, program=__file__) for _ in range(repeats)]
    return runs[0][0], min(run[1] for run in runs)


def child(method: str, model: str, tier: str) -> dict[str, Any]:
    import paceline

    llm = paceline.load(model, drafter=method, tier=tier)
    stats = llm.generate(PROMPT, max_new_tokens=NEW, eos=()).stats
    return {"tier": llm.target.tier, "tokens": stats.tokens, "drafted": stats.drafted, "tau": stats.tau}


def table(rows: Sequence[dict[str, Any]]) -> str:
    from table import markdown

    lines = [["method", "a draft runs", "memory beside plain decoding's, MB"]]
    lines += [[f"`{row['method']}`", row["runs"], f"{row['extra'] / 1e6:.1f}"] for row in rows]
    return markdown(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tier", default="auto")
    parser.add_argument("--methods", default=METHODS, type=lambda text: text.split(","))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="the numbers, as JSON")
    parser.add_argument("--child", nargs=3, metavar=("METHOD", "MODEL", "TIER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(*args.child)))
        return
    about, plain = peak(PLAIN, args.model, args.tier, args.repeats)
    rows = []
    for method in args.methods:
        facts, most = peak(method, args.model, args.tier, args.repeats)
        runs = RUNS_MODEL.get(method.partition(":")[0].partition("+")[0], "")
        rows.append({"method": method, "runs": runs, "peak": most, "extra": most - plain, **facts})
    if args.out:
        from paceline.bench.machine import machine
        from paceline.files import whole

        told = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
        with whole(args.out) as path:
            path.write_text(json.dumps({**told, "plain": {"peak": plain, **about}, "rows": rows}, indent=1) + "\n")
    print(f"plain decoding on the {about['tier']} tier: {plain / 1e6:.1f} MB at its peak\n\n{table(rows)}")


if __name__ == "__main__":
    main()
