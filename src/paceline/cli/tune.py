"""`paceline tune`: learn on your own prompts what drafting costs and brings, for the runs that come."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from typing import Annotated

from typer import Option

from paceline.cli.console import print_json
from paceline.cli.options import MethodOptions, ModelOptions, grouped


@grouped
def tune(
    source: ModelOptions,
    prompts: Annotated[str, Option("--prompts", help="JSONL file of prompts, as --suite of paceline bench.")],
    limit: Annotated[int | None, Option("--limit", min=1, help="First prompts of each task.")] = None,
    max_new_tokens: Annotated[int, Option("--max-new-tokens", "-n", min=1, help="Of each prompt.")] = 128,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure passes and sources of drafts on your prompts: later runs of this model start from what was learned.

    Those with the same tier, type and threads do; their output is the same.
    """
    from paceline.bench.suites import load_suite
    from paceline.bench.tune import tune as run

    chosen = load_suite(prompts, limit=limit)
    llm = replace(source, fresh=True).llm(MethodOptions())
    found = run(llm, chosen, max_new_tokens)
    if as_json:
        print_json(asdict(found) | {"path": str(found.path)})
        return
    shares = ", ".join(f"{name} {count / sum(found.sources.values()):.0%}" for name, count in found.sources.items())
    print(f"plain decoding {found.plain:.1f} tokens/s, auto {found.auto:.1f}, {found.tau:.2f} tokens a pass")
    print(f"tokens by source: {shares}")
    print(f"stored in {found.path}", file=sys.stderr)
