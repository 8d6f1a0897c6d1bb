"""Tokens a second and peak memory of `paceline trigram build`, on a corpus and on one several times as large.

    python benchmarks/trigram_build.py --corpus FILE [--corpus FILE …] [--times 10] [--memory 256]

The larger corpus repeats the lines of each file in another order each time. Each build is a process of its own; its
peak memory is what the system says of it (ru_maxrss), as `/usr/bin/time -v` does.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "results" / "trigram" / "build.json"


def build(corpus: Sequence[Path], out: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One build's figures, from its report and from the system."""
    files = [word for path in corpus for word in ("--corpus", str(path))]
    words = ["trigram", "build", "--model", args.model, *files, "--out", str(out), "--memory", str(args.memory)]
    report = out.with_suffix(".json")
    started = time.perf_counter()
    child = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "paceline", *words, "--json"],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, str(report), os.O_WRONLY | os.O_CREAT, 0o600)],
    )
    _, status, usage = os.wait4(child, 0)
    if status:
        sys.exit("the build failed")
    built = json.loads(report.read_text())
    return {
        "corpus_bytes": sum(path.stat().st_size for path in corpus),
        "tokens": built["tokens"],
        "seconds": built["seconds"],
        "process_seconds": round(time.perf_counter() - started, 1),
        "tokens_per_s": round(built["tokens"] / built["seconds"]),
        "peak_mb": round(usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6),
        "matrix_bytes": built["bytes"],
        "ngrams": built["ngrams"],
        "threshold": built["threshold"],
    }


def repeated(path: Path, times: int, folder: Path, index: int) -> Path:
    """The lines of a JSONL file so many times, each time in another order."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        lines = file.readlines()
    larger, order = folder / f"{index}-{path.name.removesuffix('.gz')}", random.Random(0)
    with larger.open("w", encoding="utf-8") as file:
        for _ in range(times):
            order.shuffle(lines)
            file.writelines(lines)
    return larger


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, action="append", required=True, help="JSONL, .gz or not")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--memory", type=int, default=256)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for times in (1, args.times):
            corpus = [repeated(path, times, Path(folder), index) for index, path in enumerate(args.corpus)]
            rows.append({"times": times} | build(corpus, Path(folder) / f"matrix{times}", args))
            print(json.dumps(rows[-1]), flush=True)
    # Not before: what this process has ever held counts as the least that its children did, and this loads torch.
    from paceline.bench.machine import machine

    result = {
        "corpus": [path.name for path in args.corpus],
        "memory": args.memory,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "rows": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
