"""`paceline train prompts`: what a chat model would be asked, in its own words."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.progress import track
from typer import Exit, Option

from paceline.cli.options import MethodOptions, ModelOptions, given_path, grouped


@grouped
def prompts(
    source: ModelOptions,
    out: Annotated[Path, Option("--out", "-o", parser=given_path, metavar="FILE", help="JSONL file to write.")],
    count: Annotated[int, Option("--count", "-c", min=1, help="How many.")] = 1000,
    max_new_tokens: Annotated[int, Option("--max-new-tokens", "-n", min=1, help="Longest prompt.")] = 256,
    temperature: Annotated[float, Option("--temperature", "-t", help="Of all tokens.")] = 1.0,
    batch: Annotated[int, Option("--batch", "-b", min=1, help="Prompts written at a time.")] = 16,
    seed: Annotated[int, Option("--seed", min=0, max=2**31 - 1, help="Makes it repeatable.")] = 0,
) -> None:
    """Let a chat model make up prompts itself (Magpie), to make data from: no other text is needed."""
    from paceline.files import whole
    from paceline.training.data.own_prompts import TRIES, own_prompts

    llm = source.llm(MethodOptions(drafter="none"))
    made = own_prompts(llm, count, temperature=temperature, max_new_tokens=max_new_tokens, batch=batch, seed=seed)
    console = Console(stderr=True)
    with whole(out) as partial, partial.open("w", encoding="utf-8") as file:
        written, stopped = 0, False
        try:
            for text in track(made, "prompts", count, console=console, disable=not console.is_terminal):
                file.write(json.dumps({"prompt": text}, ensure_ascii=False) + "\n")
                written += 1
        except KeyboardInterrupt:  # what there is can be used
            stopped = True
            if not written:
                raise
    print(f"{written:,} prompts")
    if stopped:
        raise Exit(130)
    if written < count:
        wanted = f"of {count:,}: in {TRIES * count:,} attempts"
        print(f"{written:,} {wanted} no more ended within {max_new_tokens} tokens (--max-new-tokens)", file=sys.stderr)
