"""What another type of the native tier's products gains and changes: passes in turns, and the next tokens of a text.

    python benchmarks/dtypes.py --suite benchmarks/prompts/tuning.jsonl [--dtypes int8,bfloat16] [--out FILE.json]
    python benchmarks/dtypes.py --suite benchmarks/prompts/tuning.jsonl --dtypes bfloat16@avx512,bfloat16@amx

The text is the suite's prompts with what float32 answers to them. Each type reads it in one pass a prompt: how often
its likeliest next token is float32's, in the answers and in the prompts, and what the prompts' tokens cost it in nats.
Passes are the lower quartile of some repeats, by width, after 256 tokens. A type may name its instruction set.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import paceline
from paceline.bench.machine import machine
from paceline.bench.suites import load_suite
from paceline.profiling.timing import compare_passes
from paceline.targets.native import build
from paceline.targets.span import Span

if TYPE_CHECKING:
    from paceline.targets.target import Target

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


class Text(NamedTuple):
    """Token ids; from `answer` on they are float32's."""

    ids: list[int]
    answer: int


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--suite", required=True, help="as for `paceline bench`")
    parser.add_argument("--limit", type=int, help="prompts of each task")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtypes", default="int8,bfloat16", help="beside float32: types, or TYPE@SET")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    llm = paceline.load(options.model, drafter="none", tier="native")
    prompts = [prompt.turns[0] for prompt in load_suite(options.suite, (), options.limit)]
    answers = [llm.generate(prompt, max_new_tokens=options.max_new_tokens) for prompt in prompts]
    heads = [llm.encode(prompt) for prompt in prompts]
    texts = [Text([*head, *answer.tokens], len(head)) for head, answer in zip(heads, answers, strict=True)]
    dtypes = ["float32", *options.dtypes.split(",")]
    targets = [load(options.model, dtype) for dtype in dtypes]
    timed = compare_passes(targets, WIDTHS, 256, options.repeats)
    rows = {}
    for dtype, target, passes in zip(dtypes, targets, timed, strict=True):
        low = {width: 1000 * timing.low for width, timing in passes.timings.items()}
        rows[dtype] = {"milliseconds": low, **likeness(targets[0], target, texts)}
    print(table(rows))
    if options.out:
        about = {"model": options.model, "machine": machine(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
        options.out.write_text(json.dumps({**about, "threads": torch.get_num_threads(), "rows": rows}, indent=1) + "\n")


def load(model: str, dtype: str) -> Target:
    """The native tier in a type, all of whose passes run on the instruction set that the type names, or the fastest."""
    dtype, _, name = dtype.partition("@")
    name = name or build.runnable()[-1]
    build.choose(name)
    target = paceline.load(model, dtype=dtype, drafter="none", tier="native").target
    for method in ("forward", "forward_greedy"):
        setattr(target, method, on_set(name, getattr(target, method)))
    return target


def on_set(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def on_its_set(*arguments: Any, **options: Any) -> Any:
        build.choose(name)
        return method(*arguments, **options)

    return on_its_set


@torch.inference_mode()
def likeness(plain: Target, target: Target, texts: list[Text]) -> dict[str, float]:
    """Of a type: percent of next tokens that are float32's, and nats a token of prompts."""
    alike, nats, answers, prompts = {"answers": 0, "prompts": 0}, 0.0, 0, 0
    for text in texts:
        want, got = (logits(one, text.ids) for one in (plain, target))
        same = (want.argmax(-1) == got.argmax(-1)).tolist()
        alike["prompts"] += sum(same[: text.answer - 1])
        alike["answers"] += sum(same[text.answer - 1 : -1])
        chosen = torch.tensor(text.ids[1 : text.answer])
        nats -= float(got[: text.answer - 1].log_softmax(-1)[torch.arange(len(chosen)), chosen].sum())
        prompts, answers = prompts + len(chosen), answers + len(text.ids) - text.answer
    return {
        "answers": 100 * alike["answers"] / answers,
        "prompts": 100 * alike["prompts"] / prompts,
        "nats": nats / prompts,
    }


def logits(target: Target, ids: list[int]) -> torch.Tensor:
    cache = target.new_cache(1, len(ids))
    return target.forward(Span(torch.tensor([ids]), cache.lengths.copy()), cache).logits[0]


def table(rows: dict[str, dict]) -> str:
    widths = rows["float32"]["milliseconds"]
    lines = ["| | " + " | ".join(f"T({width})" for width in widths) + " | answers | prompts | nats |"]
    lines.append("| --- |" + " --: |" * (len(widths) + 3))
    for dtype, row in rows.items():
        passes = row["milliseconds"]
        cells = [f"{milliseconds:.2f}" for milliseconds in passes.values()]
        cells += [f"{row[name]:.1f} %" for name in ("answers", "prompts")] + [f"{row['nats']:.3f}"]
        lines.append(f"| `{dtype}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
