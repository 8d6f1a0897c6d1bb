"""paceline's drafters inside vLLM: the same ids as its plain decoding, the same acceptance as here.

    python tests/vllm/drafters.py [--methods trigram,suffix,...] [--concurrency 1,16] [--prompts N] ...
    python tests/vllm/drafters.py --parallel 2 [--executor ray]

vLLM runs in the environment of check.py, with this checkout's paceline on its path. It continues prompts greedily,
plainly, with each drafter as a chain of `--draft` tokens, with lengths by cost (`auto`), and with its own drafters
(`ngram`, `vllm-suffix`), at each number of prompts at a time. With `--parallel` the processes share each layer, plain
decoding runs in one. Exit status 1: ids that differ from plain decoding's, or a fixed chain whose accepted tokens a
round are more than `--tolerance` away from paceline's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from check import HERE, PROMPTS, Run, environment, paths, same
from even_heads import with_even_heads

import paceline
from paceline.bench.suites import load_suite
from paceline.targets.sources import resolve

OURS = ("trigram", "trigram:guide=auto", "suffix", "prompt-lookup", "merge:drafters=suffix|trigram", "auto")
FIXED = OURS[:4]  # drafted in chains of one length
THEIRS = {
    "ngram": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "vllm-suffix": {"method": "suffix"},
}


def main() -> None:
    options = parse()
    with TemporaryDirectory() as folder:
        raise SystemExit(1 if failures_of(options, Path(folder)) else 0)


def failures_of(options: argparse.Namespace, scratch: Path) -> int:
    """How many methods failed at how many levels."""
    location, levels = Path(resolve(options.model).location), [int(level) for level in options.concurrency.split(",")]
    even = with_even_heads(location, options.parallel, scratch / "even")
    llm = paceline.load(options.model, drafter="none")
    suite = load_suite(options.suite, (), options.limit, 1)
    suite = suite[:: max(len(suite) // options.prompts, 1)][: options.prompts] if options.prompts else suite
    prompts = [llm.encode(prompt.turns[0]) for prompt in suite]
    python = options.python or environment()

    def serve(speculative: dict[str, Any] | None, engine: dict[str, Any]) -> list[dict[str, Any]]:
        shared = speculative is not None and options.parallel > 1
        if shared:
            engine |= {"tensor_parallel_size": options.parallel, "distributed_executor_backend": options.executor}
        more = [HERE / "ray_on_cpu"] if shared and options.executor == "ray" else []
        asked = {"model": str(even if shared else location), "speculative": speculative, "prompts": prompts}
        asked |= {"tokens": options.tokens, "concurrency": levels, "engine": engine}
        done = subprocess.run(
            [python, HERE / "serve.py"],
            input=json.dumps(asked),
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            env=os.environ | paths(*more),
        )
        if done.returncode:
            raise SystemExit(f"vLLM ended with exit status {done.returncode}: {speculative or 'plain'}")
        answers: list[dict[str, Any]] = json.loads(done.stdout)
        return answers

    plain = serve(None, {})
    failures = 0
    for method in options.methods.split(","):
        fixed = method in FIXED
        name = f"{method}:budget={options.draft}+fixed:k={options.draft}" if fixed else method
        found = serve(*asked_of(name, options.draft))
        expected = here(llm, name, method, prompts, plain[0]["ids"], options) if fixed else None
        for level, answer, reference in zip(levels, found, plain, strict=True):
            equal = same(Run(answer["ids"]), Run(reference["ids"]))
            accepted = sum(answer["accepted"]) / max(answer["drafts"], 1)
            failed = equal < len(prompts)
            if expected is not None:
                failed |= abs(accepted - expected) > options.tolerance * max(expected, accepted)
            failures += failed
            print(
                f"{method} x {level}: {'FAILED' if failed else 'ok'}, {equal} of {len(prompts)} as plain; "
                f"{accepted:.3f} accepted a draft"
                + (f", here {expected:.3f}" if expected is not None else "")
                + f"; {int(sum(answer['accepted']))} of {int(answer['drafted'])} drafted; "
                f"{reference['seconds'] / answer['seconds']:.2f} x plain",
                flush=True,
            )
    return failures


def asked_of(method: str, draft: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The speculative config of a method, and more arguments of `vllm.LLM`."""
    if method in THEIRS:
        return {**THEIRS[method], "num_speculative_tokens": draft}, {}
    proposer = {"method": "custom_class", "model": "paceline.integrations.vllm.Proposer"}
    return {**proposer, "num_speculative_tokens": draft}, {"additional_config": {"paceline": {"method": method}}}


def here(
    llm: paceline.LLM,
    name: str,
    method: str,
    prompts: Sequence[list[int]],
    plain: list[list[int]],
    options: argparse.Namespace,
) -> float:
    """Accepted tokens a draft in paceline, whose trigrams are told to draft chains, as in vLLM.

    vLLM drafts beyond an answer's end, and counts what is accepted there: answers are continued for as much.
    """
    name = name.replace("trigram:", "trigram:candidates=1:") if method.startswith("trigram") else name
    begun = [prompt + ids[:1] for prompt, ids in zip(prompts, plain, strict=True)]
    outputs = llm.method(name).generate(begun, eos=(), max_new_tokens=options.tokens + options.draft)
    rounds = []
    for output in outputs:
        emitted = 1
        for record in output.stats.rounds:
            if record.depth and emitted < options.tokens:
                rounds.append(record)
            emitted += record.emitted
    return sum(record.accepted for record in rounds) / max(len(rounds), 1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="named model or folder with safetensors")
    parser.add_argument("--methods", default=",".join((*OURS, *THEIRS)), help="default %(default)s")
    parser.add_argument("--concurrency", default="1,16", help="prompts at a time; default %(default)s")
    parser.add_argument("--parallel", type=int, default=1, help="processes that share each layer")
    parser.add_argument("--executor", choices=("mp", "ray"), default="mp", help="what starts them")
    parser.add_argument("--suite", default=str(PROMPTS))
    parser.add_argument("--limit", type=int, help="first prompts of each task")
    parser.add_argument("--prompts", type=int, help="so many of these, spread evenly over the suite")
    parser.add_argument("--tokens", type=int, default=64, help="of each continuation")
    parser.add_argument("--draft", type=int, default=4, help="tokens a draft, at most")
    parser.add_argument("--tolerance", type=float, default=0.03, help="of what is accepted, relative")
    parser.add_argument("--python", type=Path, help="an interpreter that has vLLM, instead of a new environment")
    return parser.parse_args()


if __name__ == "__main__":
    main()
