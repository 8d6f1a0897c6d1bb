"""How long a fresh process takes: to help, and to the first token of `paceline generate`.

    python benchmarks/startup.py                             # this checkout
    python benchmarks/startup.py --against OTHER/src         # and another one's sources, by turns

Every figure is a process of its own, timed from its start to the first byte that it prints; the cases take turns, so
that a machine whose speed drifts is unfair to none. Besides, the processor time of the whole process, which other work
on the machine disturbs less. Each side has its own packed weights (`packed`: they are there; `not packed`: this start
makes them), and shares the user's converted models and compiled libraries; a first start of each side, which may
compile and fetch, is not counted. The files are in the page cache.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
PROMPT = "Explain drafting in cycling."
CASES = {
    "`--help`": ["--help"],
    "native, `none`, packed": ["--tier", "native", "--drafter", "none"],
    "native, `none`, not packed": ["--tier", "native", "--drafter", "none"],
    "native, default drafter, packed": ["--tier", "native"],
    "torch, `none`": ["--tier", "torch", "--drafter", "none"],
    "reference, `none`": ["--tier", "reference", "--drafter", "none"],
}


@dataclass
class Side:
    """A checkout's sources, with a cache of its own for what they pack.

    Attributes:
        seconds: by case, to the first byte.
        processor: by case, of user and system together.
    """

    sources: Path
    cache: Path
    seconds: dict[str, list[float]] = field(default_factory=dict)
    processor: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache.mkdir()
        shared = Path(os.environ.get("PACELINE_CACHE") or "~/.cache/paceline").expanduser().absolute()
        for name in ("models", "native"):
            (shared / name).mkdir(parents=True, exist_ok=True)
            (self.cache / name).symlink_to(shared / name)

    def run(self, case: str, model: str) -> None:
        if case.endswith("not packed"):
            shutil.rmtree(self.cache / "packed", ignore_errors=True)
        words = CASES[case] if case == "`--help`" else ["generate", "-m", model, *CASES[case], "-n", "1", PROMPT]
        before, started = os.times(), time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline", *words],
            env=os.environ | {"PYTHONPATH": str(self.sources), "PACELINE_CACHE": str(self.cache)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        assert process.stdout
        process.stdout.read(1)
        seconds = time.perf_counter() - started
        errors = process.communicate()[1]
        if process.returncode:
            sys.exit(f"{self.sources}, {case}: {errors.decode().strip()}")
        after = os.times()
        spent = after.children_user + after.children_system - before.children_user - before.children_system
        self.seconds.setdefault(case, []).append(seconds)
        self.processor.setdefault(case, []).append(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="OTHER/src", help="sources of another checkout")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    folders = {"now": HERE.parent / "src"}
    if args.against:
        if not (args.against / "paceline").is_dir():
            parser.error("name the other checkout's src, the folder that holds paceline/")
        folders = {"other": args.against.absolute(), **folders}
    with tempfile.TemporaryDirectory() as work:
        sides = {name: Side(sources, Path(work, name)) for name, sources in folders.items()}
        for turn in range(args.rounds + 1):
            for case in CASES:
                for side in sides.values():
                    side.run(case, args.model)
            if turn == 0:  # a first time compiles, and reads all files from the disk
                for side in sides.values():
                    side.seconds.clear()
                    side.processor.clear()
    show(sides)


def show(sides: dict[str, Side]) -> None:
    """Seconds, least (median)."""
    heads = [f"{name}, {what}" for name in sides for what in ("s to the first byte", "CPU s")]
    print("| " + " | ".join(["", *heads]) + " |", "| --- |" + " --: |" * len(heads), sep="\n")
    for case in CASES:
        cells = [case]
        for side in sides.values():
            times, spent = side.seconds[case], side.processor[case]
            cells += [f"{min(times):.2f} ({median(times):.2f})", f"{min(spent):.2f} ({median(spent):.2f})"]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
