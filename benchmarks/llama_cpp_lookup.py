"""llama.cpp's drafter `ngram-cache` with the trigrams that `paceline export llama-cpp-lookup` wrote, and without.

    python benchmarks/llama_cpp_lookup.py --work FOLDER [--suite FILE] [--limit N] [--out FILE.json]

llama.cpp (xllamacpp, in the environment that `make bench-field` makes in `--work`) reads the file itself, decodes every
prompt plainly and both ways by turns, and says how many tokens it accepted. Greedy ids are held against its plain ones.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "field"))

from engine import Engine, EngineError  # noqa: E402
from environments import Unusable, interpreter  # noqa: E402
from peers import LLAMA, PEERS  # noqa: E402

import paceline  # noqa: E402
from paceline.bench.suites import load_suite  # noqa: E402
from paceline.cli.app import app  # noqa: E402
from paceline.targets.machine import cpu  # noqa: E402
from paceline.targets.sources import resolve  # noqa: E402

PATIENCE = 600  # seconds for an answer
PLAIN, OWN, WITH = "plain", "ngram-cache", "ngram-cache with paceline's trigrams"
WARM_UP = "Name three rivers and say where each of them begins."


def main() -> None:
    options = parse()
    source, llm = resolve(options.model), paceline.load(options.model, drafter="none", tier="reference")
    if source.gguf is None:
        raise SystemExit(f"error: {options.model} does not come from a GGUF file, which llama.cpp needs")
    prompts = [llm.encode(prompt.turns[0]) for prompt in load_suite(options.suite, (), options.limit)]
    settings = {
        "gguf": str(source.gguf),
        "threads": options.threads,
        "context": max(map(len, prompts)) + options.max_new_tokens + 64,
    }
    with ExitStack() as stack:
        static = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "static.bin"
        app(["export", "llama-cpp-lookup", "--model", options.model, "--out", str(static)], standalone_mode=False)
        cache = {"type": "NGRAM_CACHE"}
        modes = {PLAIN: {}, OWN: cache, WITH: {**cache, "static": str(static)}}
        try:
            engines = {name: started(name, of, settings, options, stack) for name, of in modes.items()}
            for name, engine in engines.items():
                engine.ask(question(name, llm.encode(WARM_UP), 8), PATIENCE)
            runs = measured(engines, prompts, options.max_new_tokens)
        except (Unusable, EngineError) as error:
            raise SystemExit(f"error: {error}") from error
    rows = [summarised(name, answers, runs[PLAIN]) for name, answers in runs.items()]
    print("| llama.cpp | tokens/s | x plain | tokens a pass | same ids |\n| --- | --: | --: | --: | --: |")
    for row in rows:
        print(
            f"| {row['mode']} | {row['tokens_per_s']:.1f} | {row['x_plain']:.2f} | {row['tokens_a_pass']:.2f} "
            f"| {row['identical']} of {row['prompts']} |"
        )
    if options.out:
        about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": cpu(), "threads": options.threads}
        about |= {"model": options.model, "max_new_tokens": options.max_new_tokens, "suite": Path(options.suite).name}
        options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def started(
    name: str, mode: dict[str, Any], settings: dict[str, Any], options: argparse.Namespace, stack: ExitStack
) -> Engine:
    """A process that has loaded. Raises Unusable or EngineError."""
    [peer] = [peer for peer in PEERS if peer.name == LLAMA]
    log = options.work / "logs" / f"lookup-{len(mode)}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [str(interpreter(peer, options.work)), str(HERE / "field" / peer.adapter)]
    engine = stack.enter_context(Engine([*command, json.dumps({**settings, "modes": {name: mode}})], log))
    told = engine.ready(PATIENCE)
    if failed := told.get("error") or told["failed"]:
        raise EngineError(f"{name}: {failed}")
    return engine


def question(mode: str, ids: list[int], tokens: int) -> dict[str, Any]:
    return {"mode": mode, "ids": ids, "max_new_tokens": tokens, "temperature": 0.0, "seed": 0}


def measured(engines: dict[str, Engine], prompts: list[list[int]], tokens: int) -> dict[str, list[dict[str, Any]]]:
    """Each mode's answers, in the order of the prompts."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for number, ids in enumerate(prompts):
        names = [*engines][number % len(engines) :] + [*engines][: number % len(engines)]
        for name in names:
            answer = engines[name].ask(question(name, ids, tokens), PATIENCE)
            if "error" in answer:
                raise EngineError(f"{name}: {answer['error']}")
            runs[name].append(answer)
    return runs


def summarised(mode: str, answers: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    def speed(some: list[dict[str, Any]]) -> float:
        return sum(len(answer["ids"]) for answer in some) / sum(answer["seconds"] for answer in some)

    return {
        "mode": mode,
        "tokens_per_s": speed(answers),
        "x_plain": speed(answers) / speed(plain),
        "tokens_a_pass": sum(len(a["ids"]) for a in answers) / sum(a["passes"] for a in answers),
        "identical": sum(mine["ids"] == theirs["ids"] for mine, theirs in zip(answers, plain, strict=True)),
        "prompts": len(answers),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of environments and logs")
    parser.add_argument("--model", default="smollm2-135m", help="named model that comes from a GGUF file")
    parser.add_argument("--suite", default=str(HERE / "prompts" / "tuning.jsonl"))
    parser.add_argument("--limit", type=int, help="first prompts of each task")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
