"""Plain generation: llama.cpp against paceline's native tier, on the same GGUF file, prompt by prompt by turns.

    python benchmarks/llama_cpp.py [--limit 4] [--out FILE.json]

Both are given the same token ids and continue them greedily by the same number of tokens, whatever they are, with the
same number of threads; seconds are wall clock, from the prompt's ids to the last token. llama.cpp (the package
xllamacpp) runs in a process and a virtual environment of its own, kept in paceline's cache and made on first use.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

import torch

import paceline
from paceline.bench.machine import machine
from paceline.bench.suites import load_suite
from paceline.targets import store
from paceline.targets.sources import resolve

HERE = Path(__file__).parent
PACKAGE = "xllamacpp==2026.10.11549"
PAUSE = 0.3  # seconds between turns, for the threads of the one before to go to sleep
BOTH = ("paceline", "llama.cpp")


def main() -> None:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    source = resolve(options.model)
    if source.gguf is None:
        raise SystemExit(f"{options.model} does not come from a GGUF file")
    llm = paceline.load(options.model, drafter="none", tier="native")
    if llm.target.tier != "native":
        raise SystemExit("the native tier cannot be built here")
    prompts = load_suite(options.suite, (), options.limit, 1)
    ids = {prompt.id: llm.encode(prompt.turns[0]) for prompt in prompts}
    context = max(map(len, ids.values())) + options.max_new_tokens + 64

    with worker(options.python or environment(), source.gguf, context) as ask:
        build = ask(None)

        def run(name: str, prompt: list[int], tokens: int) -> dict[str, Any]:
            if name == "llama.cpp":
                return ask({"prompt": prompt, "tokens": tokens})
            return generate(llm, prompt, tokens)

        for name in BOTH:
            run(name, ids[prompts[0].id], 8)  # pages come in, threads start
        rows = []
        for number, prompt in enumerate(prompts):
            for name in BOTH if number % 2 else BOTH[::-1]:
                time.sleep(PAUSE)
                rows.append({"id": prompt.id, "task": prompt.task, "runtime": name})
                rows[-1] |= run(name, ids[prompt.id], options.max_new_tokens)
            show(rows[-2:], len(ids[prompt.id]))
    result = summary(rows)
    print(json.dumps(result, indent=1))
    if options.out:
        about = {"model": options.model, "max_new_tokens": options.max_new_tokens, "llama.cpp": build}
        about |= {"machine": machine(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({**about, **result, "runs": rows}, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="named model or GGUF file")
    parser.add_argument("--suite", default=str(HERE / "prompts" / "tuning.jsonl"))
    parser.add_argument("--limit", type=int, default=4, help="first prompts of each task")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--python", type=Path, help="an interpreter that has xllamacpp, instead of a new environment")
    parser.add_argument("--out", type=Path, help="write all numbers here, as JSON")
    return parser.parse_args()


def generate(llm: paceline.LLM, prompt: list[int], tokens: int) -> dict[str, Any]:
    """What the worker tells, by paceline."""
    started = time.perf_counter()
    [request] = llm.requests([prompt], max_new_tokens=tokens, eos=())
    for _ in llm.engine.run([request]):
        pass
    seconds = time.perf_counter() - started
    text = llm.tokenizer.decode(request.output)
    spent = request.stats.prefill_seconds
    return {"tokens": len(request.output), "seconds": seconds, "prompt_seconds": spent, "text": text}


def environment() -> Path:
    """The interpreter of a virtual environment with llama.cpp in it."""
    folder = store.root() / "llama-cpp-venv"
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", PACKAGE], check=True)
    return python


@contextmanager
def worker(python: Path, gguf: Path, context: int) -> Iterator[Any]:
    """A function that sends one question and gives the answer; None asks nothing and waits for what is told."""
    command = [str(python), str(HERE / "llama_cpp_worker.py"), str(gguf), str(torch.get_num_threads()), str(context)]
    log = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        questions, answers = process.stdin, process.stdout

        def ask(question: dict[str, Any] | None) -> dict[str, Any]:
            if question is not None:
                questions.write(json.dumps(question) + "\n")
                questions.flush()
            line = answers.readline()
            if not line:
                raise SystemExit(f"llama.cpp's process ended; try it by hand: {' '.join(command)}")
            return json.loads(line)

        yield ask
        questions.close()


def show(pair: list[dict[str, Any]], prompt_tokens: int) -> None:
    speeds = {row["runtime"]: row["tokens"] / row["seconds"] for row in pair}
    together = zip(*(row["text"] for row in pair), strict=False)
    same = sum(1 for _ in takewhile(lambda letters: letters[0] == letters[1], together))
    numbers = ", ".join(f"{name} {speeds[name]:.1f}" for name in BOTH)
    print(
        f"{pair[0]['id']} ({prompt_tokens} prompt tokens): {numbers} tokens/s, the first {same} characters the same",
        file=sys.stderr,
        flush=True,
    )


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens a second of wall clock, and after the prompt; their ratio over all prompts, and prompt by prompt."""
    mine, theirs = ([row for row in rows if row["runtime"] == name] for name in BOTH)
    theirs.sort(key=lambda row: [other["id"] for other in mine].index(row["id"]))

    def speed(of: list[dict[str, Any]], behind_prompt: bool = False) -> float:
        return sum(r["tokens"] for r in of) / sum(r["seconds"] - behind_prompt * r["prompt_seconds"] for r in of)

    ratios = [speed([a]) / speed([b]) for a, b in zip(mine, theirs, strict=True)]
    return {
        "prompts": len(mine),
        "tokens_per_s": {"paceline": speed(mine), "llama.cpp": speed(theirs)},
        "tokens_per_s_behind_prompt": {"paceline": speed(mine, True), "llama.cpp": speed(theirs, True)},
        "ratio": speed(mine) / speed(theirs),
        "ratio_by_prompt": {"least": min(ratios), "median": median(ratios), "most": max(ratios)},
    }


if __name__ == "__main__":
    main()
