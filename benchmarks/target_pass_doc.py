"""Writes the section "Measured" of docs/target-pass.md from what target_pass_tables.sh has measured.

    python benchmarks/target_pass_doc.py benchmarks/results/target-pass docs/target-pass.md

Everything from that heading to the end of the document is replaced. What has no file yet is left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from script import run_script
from table import markdown

HEADING = "## Measured"
Cells = dict[tuple[str, int, int, int], float]  # (tier, batch, context, width) -> milliseconds


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit("name the folder of results, and the document")
    folder, document = map(Path, sys.argv[1:])
    sections = []
    for name, make in MAKERS.items():
        if (path := folder / f"{name}.json").exists():
            found = json.loads(path.read_text())
            text = make(found).replace("\n\n|", f"\n\n<!-- figures: {folder} -->\n\n|", 1)  # see check_figures.py
            sections.append(f"{text}\n\n{about(found)}")
    if not sections:
        raise SystemExit(f"there is nothing in {folder}")
    text = document.read_text().partition(f"\n{HEADING}\n")[0].rstrip()
    intro = (
        "By `benchmarks/target_pass_tables.sh`. The tiers of a table ran in one process, pass by pass by turns:\n"
        "compare within a table, not between tables."
    )
    document.write_text("\n\n".join([text, HEADING, intro, *sections]) + "\n")


def about(found: dict[str, Any]) -> str:
    machine = found["machine"]
    place = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads"
    return f"({found['date'][:10]}, {found['model']}, {place}, torch {machine['torch']})"


def cells(found: dict[str, Any]) -> Cells:
    return {(row["tier"], row["batch"], row["context"], row["width"]): row["median_ms"] for row in found["passes"]}


def axis(cost: Cells, place: int) -> list[Any]:
    return list(dict.fromkeys(key[place] for key in cost))


def by_width(found: dict[str, Any]) -> str:
    cost = cells(found)
    (batch,), (context,), widths = axis(cost, 1), axis(cost, 2), axis(cost, 3)
    head = ["tier", *(f"T({width})" for width in widths), "T(1) / hf", "T(4)/T(1)", "T(8)/T(1)"]
    lines = []
    for tier in axis(cost, 0):
        times = [cost[tier, batch, context, width] for width in widths]
        one, of_hf = cost[tier, batch, context, 1], cost["hf", batch, context, 1]
        growth = [f"{cost[tier, batch, context, width] / one:.2f}" for width in (4, 8)]
        lines.append([f"`{tier}`", *(f"{time:.1f}" for time in times), f"{one / of_hf:.2f}", *growth])
    return f"Milliseconds a pass over k new tokens, {context} tokens of context, median:\n\n{markdown([head, *lines])}"


def by_context(found: dict[str, Any]) -> str:
    cost = cells(found)
    (batch,), contexts = axis(cost, 1), axis(cost, 2)
    lines = [
        [f"`{tier}`", *(both(cost, tier, batch, context, axis(cost, 3)) for context in contexts)]
        for tier in axis(cost, 0)
    ]
    head = ["T(1) / T(8) after", *(f"{context:,}" for context in contexts)]
    return f"By tokens of context, milliseconds:\n\n{markdown([head, *lines])}"


def by_batch(found: dict[str, Any]) -> str:
    cost = cells(found)
    batches, (context,) = axis(cost, 1), axis(cost, 2)
    lines = [
        [f"`{tier}`", *(both(cost, tier, batch, context, axis(cost, 3)) for batch in batches)] for tier in axis(cost, 0)
    ]
    head = ["T(1) / T(8) at batch", *map(str, batches)]
    return f"By rows of a batch, {context} tokens of context each, milliseconds a pass:\n\n{markdown([head, *lines])}"


def both(cost: Cells, tier: str, batch: int, context: int, widths: list[int]) -> str:
    return " / ".join(f"{cost[tier, batch, context, width]:.1f}" for width in widths)


def memory(found: dict[str, Any]) -> str:
    head = ["MB", "weights", "KV cache", "peak", "with a toy model", "(peak - toy) / needed", "peak / needed"]
    lines = []
    for row in found["rows"]:
        sizes = [f"{row[name] / 1e6:.0f}" for name in ("weights", "cache", "peak", "toy")]
        if row["step"] == "load":
            sizes[1] = ""
        ratios = [f"{row['ratio_without_toy']:.2f}", f"{row['ratio']:.2f}"]
        lines.append([f"`{row['tier']}`, {row['step']}", *sizes, *ratios])
    note = (
        f"Peak resident memory of a process that loads, or loads and decodes {found['new']} tokens after a prompt of "
        f"{found['prompt']:,}; and\nof one that does so with a model of no weight: what Python, torch and transformers "
        "take by themselves."
    )
    return f"{note}\n\n{markdown([head, *lines])}"


def llama_cpp(found: dict[str, Any]) -> str:
    speeds, behind, ratios = found["tokens_per_s"], found["tokens_per_s_behind_prompt"], found["ratio_by_prompt"]
    lines = [
        [name, f"{speeds[key]:.1f}", f"{behind[key]:.1f}"]
        for name, key in (("paceline, native tier, `ar`", "paceline"), ("llama.cpp", "llama.cpp"))
    ]
    note = (
        f"Plain greedy generation of {found['max_new_tokens']} tokens from the same GGUF file, {found['prompts']} "
        f"prompts by turns (xllamacpp {found['llama.cpp']['xllamacpp']}).\nTokens a second of wall clock, "
        f"{found['ratio']:.2f}x llama.cpp's ({ratios['least']:.2f} to {ratios['most']:.2f} by prompt):"
    )
    return f"{note}\n\n{markdown([['', 'in all', 'after the prompt'], *lines])}"


MAKERS = {"widths": by_width, "contexts": by_context, "batches": by_batch, "memory": memory, "llama-cpp": llama_cpp}

if __name__ == "__main__":
    run_script(main)
