"""Milliseconds that sources of drafts take for a whole batch, as inside vLLM: on one core, the least of many rounds.

    OMP_NUM_THREADS=1 python benchmarks/lookup_rows.py [--rows 64] [--depth 8] [--methods trigram,suffix,...]

A row is a text of 500 tokens of README.md, which gets two tokens a round.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from types import SimpleNamespace

import paceline
from paceline.integrations.vllm.settings import source_of

PROMPT, ROUNDS, NEW = 500, 40, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--methods", default="trigram,suffix,prompt-lookup,merge:drafters=suffix|trigram")
    options = parser.parse_args()
    target = paceline.load("smollm2-135m", drafter="none").target
    owner = SimpleNamespace(
        name=target.name,
        tier="vllm",
        tokenizer=target.tokenizer,
        vocab_size=target.vocab_size,
        device=target.device,
        chains_only=True,
        has_blocks=False,
    )
    text = target.tokenizer.encode((Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8"))
    text *= 1 + (20 * options.rows + PROMPT + NEW * ROUNDS) // len(text)
    for method in options.methods.split(","):
        lookup = source_of(method, owner).lookup
        starts = [20 * row for row in range(options.rows)]
        texts = [text[start : start + PROMPT] for start in starts]
        memories = [lookup.begin(ids) for ids in texts]
        taken = []
        for _ in range(ROUNDS):
            for start, ids in zip(starts, texts, strict=True):
                ids += text[start + len(ids) : start + len(ids) + NEW]
            started = time.perf_counter()
            for ids, memory in zip(texts, memories, strict=True):
                lookup.observe(ids, memory)
            found = lookup.propose_all(texts, memories, options.depth, 4 * options.depth)
            taken.append(time.perf_counter() - started)
        drafted = sum(len(candidates.tokens) for candidates in found) / options.rows
        print(f"{method}: {1000 * min(taken):.2f} ms for {options.rows} rows, {drafted:.1f} tokens each")


if __name__ == "__main__":
    main()
