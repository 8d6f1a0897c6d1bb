"""The share of a round that is paceline's own: everything outside the model's modules.

    python benchmarks/round_overhead.py [--model smollm2-135m] [--methods ar,prompt-lookup+fixed]

Times the modules that a pass of the reference tier calls (embedding, rotary embedding, layers, norm, head), and counts
as paceline's own all the rest of the round: drafting, masks and positions, writes to the KV cache (which happen inside
the layers), verification, commit, stop conditions, text. Fast tiers have no Hugging Face modules: there the whole
target pass stands for them. Prefill is left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

import paceline
from paceline.targets import TIERS
from paceline.targets.cache import KVCache

PROMPTS = [
    "Explain in a few sentences why the sky is blue.",
    "Repeat this list, then sort it: pear, apple, fig, plum, cherry, apple, pear, fig.",
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
]


class Stopwatch:
    """Seconds spent inside wrapped functions while running; nested calls of one stopwatch count once."""

    def __init__(self) -> None:
        self.seconds, self.running, self._depth = 0.0, True, 0

    def wrap(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.running or self._depth:
                return inner(*args, **kwargs)
            self._depth += 1
            started = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started
                self._depth -= 1

        return timed


@contextmanager
def watched(target: Any) -> Iterator[tuple[Stopwatch, Stopwatch]]:
    """Stopwatches of the target's modules and of the writes to its cache, both still during prefill."""
    modules, writes = Stopwatch(), Stopwatch()
    places: list[tuple[Any, str]] = [(KVCache, "write")]
    if target.tier != "reference":
        places += [(target, "forward"), (target, "forward_greedy")]
    elif target.has_blocks:
        decoder = target.decoder
        ends = [target.model.get_input_embeddings(), getattr(decoder, target.family.norm), target.output]
        places += [(part, "forward") for part in (*ends, decoder.rotary_emb, *decoder.layers)]
    else:
        places.append((target.model, "forward"))

    def unwatched(*args: Any, **kwargs: Any) -> Any:
        modules.running = writes.running = False
        try:
            return prefill(*args, **kwargs)
        finally:
            modules.running = writes.running = True

    prefill = target.prefill
    with ExitStack() as stack:
        stack.enter_context(patch.object(target, "prefill", unwatched))
        for owner, name in places:
            watch = writes if owner is KVCache else modules
            stack.enter_context(patch.object(owner, name, watch.wrap(getattr(owner, name))))
        yield modules, writes


def measure(llm: paceline.LLM, tokens: int, totals: dict[str, float]) -> None:
    """Add one pass over the prompts to `totals` (seconds, and rounds)."""
    for prompt in PROMPTS:
        with watched(llm.target) as (modules, writes):
            [request] = llm.requests([prompt], max_new_tokens=tokens)
            for _ in llm.engine.run([request]):
                pass
        split = request.stats.split
        inside_layers = writes.seconds if llm.target.tier == "reference" else 0.0
        for name, seconds in {
            "modules": modules.seconds - inside_layers,
            "cache writes": inside_layers,
            "rest of the pass": split["verify"] - modules.seconds,
            "draft": split["draft"],
            "sample": split["sample"],
            "other": split["other"],
            "rounds": len(request.stats.rounds),
        }.items():
            totals[name] = totals.get(name, 0.0) + seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--methods", default="ar,prompt-lookup+fixed", help="drafters that do not run the model's layers"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tier", choices=list(TIERS), default="reference")
    parser.add_argument(
        "--cpu-time", action="store_true", help="of the main thread, for a busy machine; set OMP_NUM_THREADS=1"
    )
    options = parser.parse_args()
    if options.cpu_time:
        time.perf_counter = time.thread_time

    llm = paceline.load(options.model, drafter="none", tier=options.tier)
    methods = {name: llm.method("none" if name == "ar" else name) for name in options.methods.split(",")}
    totals: dict[str, dict[str, float]] = {name: {} for name in methods}
    for repeat in range(options.repeats + 1):
        for name, method in methods.items():  # interleaved; the first time warms up
            measure(method, options.max_new_tokens, totals[name] if repeat else {})

    parts = ("modules", "cache writes", "rest of the pass", "draft", "sample", "other")
    table = Table("% of a round", *methods)
    seconds = {name: sum(total[part] for part in parts) for name, total in totals.items()}
    for part in parts:
        table.add_row(part, *(f"{100 * totals[name][part] / seconds[name]:.2f}" for name in methods))
    outside = (100 * (1 - totals[name]["modules"] / seconds[name]) for name in methods)
    table.add_row("outside the modules", *(f"{share:.2f}" for share in outside), style="bold")
    table.add_row("ms a round", *(f"{1000 * seconds[name] / totals[name]['rounds']:.1f}" for name in methods))
    Console().print(table)


if __name__ == "__main__":
    main()
