"""Decoding speed of this checkout against another one's, or what a pass of the target costs there.

    python benchmarks/against.py OTHER/src [--judge]                        # whole answers, by method
    python benchmarks/against.py OTHER/src --passes 1,2,4,8,16 --contexts 256,896 --tiers native

Each side is a process of its own over its own sources. They take turns, prompt by prompt or pass by pass, so that a
machine whose speed drifts is unfair to neither. Their token ids must agree; of passes it says whether the logits' bits
do. Passes run over KV caches of the same random numbers, and each follows others of its side, as in decoding: a
processor takes some passes to settle. `--judge` fails where ids differ, or where this checkout is
slower by more than the noise: the whole interval of the median ratio (95 %, by order statistics) is below 1. `--rows`
keeps the medians in the form of `benchmarks/releases.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from math import comb, inf
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
METHODS = ("none", "prompt-lookup", "trigram", "eagle")
TIERS = ("torch", "native")
WIDEST = 512  # a pass
SETTLING = 64  # tokens of the passes that are run before one that is timed


class Side:
    """A process that decodes with the sources in a folder."""

    def __init__(self, sources: Path, tier: str, model: str, dtype: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", tier, model, dtype],
            env=os.environ | {"PYTHONPATH": str(sources)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **what: Any) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        print(json.dumps(what), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            sys.exit("a side has ended; what it said stands above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def work(tier: str, model: str, dtype: str) -> None:
    """One side: a line in, a line out."""
    out, sys.stdout = sys.stdout, sys.stderr
    import paceline

    llm = paceline.load(model, tier=tier, drafter="none", dtype=dtype)
    made = {"none": llm}
    for line in sys.stdin:
        asked = json.loads(line)
        if "width" in asked:
            print(json.dumps(time_pass(llm.target, **asked)), file=out, flush=True)
            continue
        name = asked["method"]
        if name not in made:
            made[name] = llm.method(name)
        started = time.perf_counter()
        sampling = {"temperature": asked["temperature"], "seed": 0} if asked["temperature"] else {}
        output = made[name].generate(asked["prompt"], max_new_tokens=asked["tokens"], eos=(), **sampling)
        seconds = time.perf_counter() - started
        assert not isinstance(output, list)
        print(json.dumps({"seconds": seconds, "tokens": output.tokens}), file=out, flush=True)


def time_pass(target: Any, width: int, context: int) -> dict[str, Any]:
    """A pass of greedy decoding over `width` tokens after `context` committed ones: its seconds, and a digest of the
    logits, which a side may compute after the pass.
    """
    import numpy as np
    import torch

    from paceline.targets.span import Span

    forward = getattr(target, "forward_greedy", target.forward)
    cache = caches.get(context)
    if cache is None:
        cache = caches[context] = target.new_cache(1, context + WIDEST)
        cache.store.normal_(generator=torch.Generator().manual_seed(context))
        time_pass(target, SETTLING, context)  # as a prompt comes first
    with torch.inference_mode():
        ids = torch.arange(width)[None] + 100
        for _ in range(min(SETTLING // width, 8)):
            forward(Span(ids, np.array([context])), cache)
        started = time.perf_counter()
        out = forward(Span(ids, np.array([context])), cache)
        if getattr(out, "likeliest", None) is None:
            out.logits.argmax(-1)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "bits": hashlib.sha256(out.logits.numpy().tobytes()).hexdigest()}


caches: dict[int, Any] = {}  # of a side, by context


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?", help="the other checkout's src")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--tiers", default=",".join(TIERS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts" / "tuning.jsonl")
    parser.add_argument("--limit", type=int, default=6, help="first prompts only")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0: sampled, each answer with seed 0")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--judge", action="store_true", help="fail when this checkout is slower")
    parser.add_argument("--names", default=["this checkout", "the other"], nargs=2, help="of both, for the row")
    parser.add_argument("--rows", type=Path, help="append a row of the medians to this file of JSON lines")
    parser.add_argument("--passes", help="time passes of these widths instead, as in 1,2,4,8")
    parser.add_argument("--contexts", default="256", help="committed tokens before them")
    args = parser.parse_args()
    if args.worker:
        work(*args.worker)
        return
    if args.other is None or not (args.other / "paceline").is_dir():
        parser.error("name the other checkout's src, the folder that holds paceline/")
    if args.passes:
        compare_passes(args)
        return
    prompts = [json.loads(line)["turns"][0] for line in args.prompts.read_text().splitlines()][: args.limit]
    print(
        "| tier | method | speed against the other's, median | quartiles | of the fastest | ids |",
        "| --- | --- | --: | --: | --: | --- |",
        sep="\n",
    )
    worse: list[str] = []
    ratios: dict[str, dict[str, float]] = {}
    for tier in args.tiers.split(","):
        sides = both_sides(args, tier)
        for method in args.methods.split(","):
            ratio, fault = compare(sides, tier, method, prompts, args)
            ratios.setdefault(tier, {})[method] = ratio
            worse += [f"{tier}, {method}: {fault}"] if fault else []
        for side in sides:
            side.close()
    if args.rows:
        import releases  # not in the sides, whose sources may be older

        releases.append(releases.of_comparison(args, len(prompts), ratios), args.rows)
    if args.judge:
        if worse:
            sys.exit("\n".join(worse))
        print("nothing is slower by more than the noise, and all ids are equal")


def both_sides(args: argparse.Namespace, tier: str) -> list[Side]:
    return [Side(sources, tier, args.model, args.dtype) for sources in (HERE.parent / "src", args.other.absolute())]


def compare_passes(args: argparse.Namespace) -> None:
    """A table for each tier and context: milliseconds of both sides, minimum and median."""
    for tier in args.tiers.split(","):
        sides = both_sides(args, tier)
        for context in map(int, args.contexts.split(",")):
            print(f"\n{tier}, {context} tokens of context: this checkout and the other, ms\n")
            print("| width | least | median | least, other | median, other | least / other's | bits |")
            print("| --: | --: | --: | --: | --: | --: | --- |")
            for width in map(int, args.passes.split(",")):
                found: list[list[dict[str, Any]]] = [[], []]
                for turn in range(2 + max(args.repeats, 200 // (4 + width))):
                    for at in (0, 1) if turn % 2 else (1, 0):
                        found[at].append(sides[at].ask(width=width, context=context))
                (own, theirs), bits = ([1e3 * f["seconds"] for f in side[2:]] for side in found), "equal"
                if found[0][0]["bits"] != found[1][0]["bits"]:
                    bits = "differ"
                cells = [
                    f"{x:.2f}" for x in (min(own), median(own), min(theirs), median(theirs), min(own) / min(theirs))
                ]
                print(f"| {width} | {' | '.join(cells)} | {bits} |", flush=True)
        for side in sides:
            side.close()


def compare(
    sides: list[Side], tier: str, method: str, prompts: list[str], args: argparse.Namespace
) -> tuple[float, str | None]:
    """Prints a row; returns the median ratio, and what is worse here, if anything is."""
    ratios, fastest, same = [], [0.0, 0.0], True
    for prompt in prompts:
        for side in sides:  # a first time, which neither is judged by
            side.ask(method=method, prompt=prompt, tokens=8, temperature=args.temperature)
        least = [float("inf")] * 2
        for repeat in range(args.repeats):
            found: list[dict[str, Any]] = [{}, {}]
            for at in (0, 1) if repeat % 2 else (1, 0):
                found[at] = sides[at].ask(
                    method=method, prompt=prompt, tokens=args.tokens, temperature=args.temperature
                )
            same = same and found[0]["tokens"] == found[1]["tokens"]
            least = [min(a, b["seconds"]) for a, b in zip(least, found, strict=True)]
            ratios.append(found[1]["seconds"] / found[0]["seconds"])
        fastest = [a + b for a, b in zip(fastest, least, strict=True)]
    ratios.sort()
    low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
    print(
        f"| {tier} | `{method}` | {median(ratios):.2f} | {low:.2f} to {high:.2f} | {fastest[1] / fastest[0]:.2f} "
        f"| {'equal' if same else 'DIFFER'} |",
        flush=True,
    )
    middle, (low, high) = median(ratios), median_interval(ratios)
    if not same:
        return middle, "token ids differ"
    return middle, f"slower, {middle:.3f} ({low:.3f} to {high:.3f}) of the other's speed" if high < 1 else None


def median_interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Between which of the values their median lies with 95 %, whatever their distribution; fewer than 6 do not say."""
    ordered, count = sorted(ratios), len(ratios)
    outside = 0.5**count  # on one side, of all but `place` values
    if outside > 0.025:
        return 0.0, inf
    place = 0
    while outside + comb(count, place + 1) * 0.5**count <= 0.025:
        place += 1
        outside += comb(count, place) * 0.5**count
    return ordered[place], ordered[-1 - place]


if __name__ == "__main__":
    main()
