"""Milliseconds that sources of drafts take for a whole batch, as inside vLLM: on one core, the least of many rounds.

    OMP_NUM_THREADS=1 python benchmarks/lookup_rows.py [--rows 64] [--depth 8] [--methods trigram,suffix,...]

A row is a text of 500 tokens of README.md, which gets two tokens a round, and a hidden state where there is a guide.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import paceline
from paceline.drafters.trigram.drafter import Trigram
from paceline.drafters.trigram.guide import Guide
from paceline.drafters.trigram.guided import LibraryGuide, rows_of
from paceline.integrations.vllm.settings import source_of

PROMPT, ROUNDS, NEW = 500, 40, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--methods", default="trigram,suffix,prompt-lookup,merge:drafters=suffix|trigram,auto")
    options = parser.parse_args()
    target = paceline.load("smollm2-135m", drafter="none").target
    owner = SimpleNamespace(
        name=target.name,
        tier="vllm",
        tokenizer=target.tokenizer,
        vocab_size=target.vocab_size,
        device=target.device,
        foreign=True,
        chains_only=True,
        has_blocks=False,
    )
    text = target.tokenizer.encode((Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8"))
    text *= 1 + (20 * options.rows + PROMPT + NEW * ROUNDS) // len(text)
    for method in options.methods.split(","):
        source = source_of(method, owner)
        lookup, states = source.lookup, torch.randn(options.rows, target.config.hidden_size)
        give_guides(source.drafter, target)
        starts = [20 * row for row in range(options.rows)]
        texts = [text[start : start + PROMPT] for start in starts]
        memories = [lookup.begin(ids) for ids in texts]
        taken = []
        for _ in range(ROUNDS):
            for start, ids in zip(starts, texts, strict=True):
                ids += text[start + len(ids) : start + len(ids) + NEW]
            started = time.perf_counter()
            for ids, memory, state in zip(texts, memories, states, strict=True):
                lookup.told(memory, state)
                lookup.observe(ids, memory)
            found = lookup.propose_all(texts, memories, options.depth, 4 * options.depth)
            taken.append(time.perf_counter() - started)
        drafted = sum(len(candidates.tokens) for candidates in found) / options.rows
        print(f"{method}: {1000 * min(taken):.2f} ms for {options.rows} rows, {drafted:.1f} tokens each")


def give_guides(drafter: Any, target: Any) -> None:
    """As vLLM's integration does it when there is a model."""
    for part in drafter.parts or [drafter]:
        if isinstance(part, Trigram) and part.awaits:
            made, _ = Guide.take(part.awaits, target)
            part.lookup.guide = LibraryGuide(made, rows_of(target))


if __name__ == "__main__":
    main()
