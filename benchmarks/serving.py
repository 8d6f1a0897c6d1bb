"""Throughput and latency of servers against concurrency: paceline's methods, and other servers under the same load.

    python benchmarks/serving.py --suite FILE [--tasks NAMES] [--levels 1,2,4,8,16] [--fixed suffix,recycling] [--llama]
        [--transformers] [--other NAME=URL] [--tokens 64] [--repeats 3] [--out FILE.json]

At each level so many clients ask one question after the other, greedily and streaming. Methods and servers take turns,
level by level and repeat by repeat; of the repeats the median counts, and of the `--fixed` methods the best at each
level. How many times as fast `auto` is as the others is said apart: the median over turns that follow each other.
`--llama`: llama.cpp's server (the package xllamacpp, in a virtual environment of its own) on the same GGUF file, plain
and with drafts. `--transformers`: `transformers serve` on the same weights. `--other`: any server with the OpenAI API
that runs already.
With `--suite speed-bench:config=throughput_1k --tasks low_entropy` it is SPEED-Bench's throughput: tokens/s of all
clients together, and those that one of them sees, against how many there are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from math import ceil
from operator import truediv
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import httpx
import torch
from llama_cpp import environment
from script import run_script
from serve_faults import serving

from paceline.bench.machine import machine
from paceline.bench.suites import load_suite
from paceline.targets.sources import resolve

HERE = Path(__file__).parent
LLAMA_DRAFTERS: tuple[list[str], ...] = ([], ["NGRAM_MOD"])  # of those that need no other model


class Way(NamedTuple):
    """Where requests go, and what is added to them."""

    name: str
    url: str
    more: dict[str, Any]


class Answered(NamedTuple):
    """What became of one request; times in seconds."""

    tokens: int
    first: float
    whole: float


def main() -> None:
    options = parse()
    levels = [int(level) for level in options.levels.split(",")]
    prompts = [
        prompt.turns[0]
        for prompt in load_suite(options.suite, options.tasks.split(",") if options.tasks else (), options.limit)
    ]
    offered = [part for method in options.fixed.split(",") for part in ("--offer", method.partition("+")[0])]
    with ExitStack() as stack:
        ours = stack.enter_context(
            serving(options.model, "--rows", str(max(levels)), "--context", str(options.context), *offered)
        )
        ways = [Way("plain", ours.url, {"paceline": {"speculate": False}}), Way("auto", ours.url, {})]
        for method in options.fixed.split(","):
            drafter, _, policy = method.partition("+")
            named = {"drafter": drafter} | ({"policy": policy} if policy else {})
            ways.append(Way(method, ours.url, {"paceline": named}))
        source = resolve(options.model)
        if options.llama:
            size = os.cpu_count(), max(levels), options.context
            for drafter in LLAMA_DRAFTERS:
                command = [environment(), HERE / "llama_server.py", source.gguf, *size, *drafter]
                ways.append(Way(" ".join(["llama-server", *drafter]), stack.enter_context(started(command)), {}))
        if options.transformers:
            folder = source.location
            ways.append(Way("transformers serve", stack.enter_context(hugging_face(folder)), {"model": folder}))
        ways += [Way(name, url, {}) for name, url in (other.split("=", 1) for other in options.other)]
        rows = measure(ways, prompts, levels, options)
    best = add_best(rows, options.fixed.split(","))
    print(table(best))
    for other in ("plain", "best fixed"):
        ratios = ratio(best, "auto", other)
        print(f"auto / {other}: " + ", ".join(f"{ratios[level]:.2f}" for level in levels))
    if options.out:
        about = {"model": options.model, "machine": machine(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
        options.out.write_text(json.dumps({**about, "threads": torch.get_num_threads(), "rows": best}, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", required=True, help="as for `paceline bench`")
    parser.add_argument("--tasks", default="", help="only these of the suite, comma-separated")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--levels", default="1,2,4,8,16", help="clients at a time")
    parser.add_argument("--fixed", default="suffix,recycling", help="methods as in drafter+policy")
    parser.add_argument("--llama", action="store_true")
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--other", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--limit", type=int, default=2, help="prompts of each task of the suite")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--each", type=int, default=2, help="requests of each client on average, at least")
    parser.add_argument("--least", type=int, default=24, help="requests of all clients together, at least")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def measure(
    ways: Sequence[Way], prompts: Sequence[str], levels: Sequence[int], options: argparse.Namespace
) -> list[dict[str, Any]]:
    rows = []
    for way in ways:  # pages come in, threads start
        asyncio.run(load(way, prompts[:1], 1, 1, 8))
    for level in levels:
        each = max(options.each, ceil(options.least / level))
        turns: dict[str, list[dict[str, Any]]] = {way.name: [] for way in ways}
        for repeat in range(options.repeats):
            for way in ways if repeat % 2 else ways[::-1]:
                row = {"way": way.name, "clients": level}
                row |= asyncio.run(load(way, prompts, level, each, options.tokens))
                print(row, file=sys.stderr, flush=True)
                turns[way.name].append(row)
        rows += map(middle, turns.values())
    return rows


def middle(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median turn; of an even number the slower one in the middle. It tells the speed of all turns, too."""
    chosen = sorted(turns, key=lambda row: row["tokens_per_s"])[(len(turns) - 1) // 2]
    return chosen | {"turns_tokens_per_s": [row["tokens_per_s"] for row in turns]}


async def load(way: Way, prompts: Sequence[str], clients: int, each: int, tokens: int) -> dict[str, Any]:
    """So many clients, who ask one question after the other until there were so many of each on average: whoever has an
    answer takes the next one, so that all are busy nearly to the end.
    """
    answers: list[Answered] = []
    questions = iter(range(clients * each))
    # A connection for each request: some servers close one that is kept in the moment when it is used again.
    async with httpx.AsyncClient(base_url=way.url, timeout=1200, headers={"Connection": "close"}) as http:

        async def client() -> None:
            for number in questions:
                answers.append(await ask(http, way, prompts[number % len(prompts)], tokens))

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        seconds = time.perf_counter() - began
    return {
        "tokens_per_s": sum(answer.tokens for answer in answers) / seconds,
        "user_tokens_per_s": user_speed(answers),
        "first_token_s": median(answer.first for answer in answers),
        "request_s": median(answer.whole for answer in answers),
    }


def user_speed(answers: Sequence[Answered]) -> float | None:
    """Tokens/s of an answer from its first token on, the mean over them (SPEED-Bench's per request, specdec_bench)."""
    speeds = [(answer.tokens - 1) / (answer.whole - answer.first) for answer in answers if answer.whole > answer.first]
    return fmean(speeds) if speeds else None


async def ask(http: httpx.AsyncClient, way: Way, prompt: str, tokens: int) -> Answered:
    body = {"model": "", "messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": tokens}
    body |= {"stream": True, "stream_options": {"include_usage": True}, **way.more}
    began, first, count, usage = time.perf_counter(), 0.0, 0, None
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{way.name}: {(await answer.aread()).decode()[:500]}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            told = bool(chunk["choices"]) and bool(chunk["choices"][0]["delta"].get("content"))
            first, count = first or told * (time.perf_counter() - began), count + told
            usage = chunk.get("usage") or usage
    whole = time.perf_counter() - began
    return Answered(usage["completion_tokens"] if usage else count, first or whole, whole)  # else a token a chunk


@contextmanager
def started(command: Sequence[object]) -> Iterator[str]:
    """A process that prints its address, until its standard input ends."""
    with subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout
        assert process.stdin
        yield process.stdout.readline().strip()
        process.stdin.close()


@contextmanager
def hugging_face(folder: str) -> Iterator[str]:
    """`transformers serve` on a model's folder."""
    url = "http://127.0.0.1:8017"
    command = [Path(sys.executable).with_name("transformers"), "serve", folder, "--port", "8017", "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        else:
            raise SystemExit(f"it ended at once; try it by hand: {' '.join(map(str, command))}")
        yield url
    finally:
        process.terminate()
        process.wait()


def add_best(rows: list[dict[str, Any]], fixed: Sequence[str]) -> list[dict[str, Any]]:
    """The rows with one more a level: the best of the fixed methods."""
    levels = dict.fromkeys(row["clients"] for row in rows)
    for level in levels:
        named = [row for row in rows if row["clients"] == level and row["way"] in fixed]
        best = max(named, key=lambda row: row["tokens_per_s"])
        rows.append(best | {"way": "best fixed", "method": best["way"]})
    return [row for row in rows if row["way"] not in fixed]


def ratio(rows: list[dict[str, Any]], way: str, other: str) -> dict[int, float]:
    """How many times as fast one way is as another at each level: the median over the turns, each with its own.

    What else a machine does changes from minute to minute, so turns that follow each other are compared.
    """
    speeds = {(row["way"], row["clients"]): row["turns_tokens_per_s"] for row in rows}
    return {
        level: median(map(truediv, speed, speeds[other, level]))
        for (name, level), speed in speeds.items()
        if name == way
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line for each way, a column for each level: tokens/s of all, of one; first token, whole request."""
    levels = list(dict.fromkeys(row["clients"] for row in rows))
    lines = ["| clients | " + " | ".join(map(str, levels)) + " |", "| --- |" + " --: |" * len(levels)]
    for way in dict.fromkeys(row["way"] for row in rows):
        cells = []
        for level in levels:
            [row] = [row for row in rows if (row["way"], row["clients"]) == (way, level)]
            speeds = f"{row['tokens_per_s']:.1f}, {row['user_tokens_per_s'] or 0:.1f}"
            cells.append(f"{speeds} ({row['first_token_s']:.2f}, {row['request_s']:.2f})")
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_script(main)
