#!/usr/bin/env python
"""Every causal architecture of transformers, as a tiny random model: does paceline run it, how, and with its output?

    python benchmarks/architectures.py --out docs/coverage.md     # all of them: minutes on one core
    python benchmarks/architectures.py llama gemma3_text          # some, as lines

Each model is decoded with several drafters, one prompt at a time and in a ragged batch, among them one that proposes
trees of the truth with wrong siblings. The ids are compared with those of the model's own greedy `generate`.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tiny_models
import torch
import transformers
from transformers import PreTrainedModel

if sys.path[0] == str(Path(__file__).parent):
    sys.path.pop(0)  # numba looks for a package of this file's name

import paceline
from paceline.drafting.base import Drafter, Row
from paceline.drafting.tree import TokenTree
from paceline.errors import ModelError, PacelineError, first_line
from paceline.files import whole
from paceline.targets import Target, as_target, make_target

PROMPTS = [[7, 11, 13, 7, 11], [5, 9, 17, 21, 5, 9, 17, 30, 5], list(range(40, 60))]  # the last beyond small windows
NEW = 20  # tokens
DRAFTERS = ("none", "prompt-lookup:branches=2", "recycling", "siblings")
TIE = 1e-3  # of the range of the logits: what rounding may decide
SECONDS = 120  # for one architecture


@dataclass
class Finding:
    """What was found out about an architecture."""

    kind: str
    outcome: str  # "same", "tie", "WRONG", "refused", "not built"
    tier: str = ""  # that `--tier auto` takes
    blocks: bool = False  # layer by layer, for the drafters that need it
    windows: bool = False
    chains: bool = False
    half: str = ""  # bfloat16: "yes" or "refused"
    note: str = ""
    ran: list[str] = field(default_factory=list)


class Siblings(Drafter):
    """Knows the output, and proposes it with wrong tokens beside every right one, before it and after it."""

    source = "siblings"

    def __init__(self, target: Target, outputs: dict[tuple[int, ...], list[int]]) -> None:
        super().__init__(target)
        self.outputs = outputs

    def max_nodes(self, depth: int) -> int:
        return 3 * depth

    def begin(self, row: Row, hidden: object) -> None:
        row.state = (len(row.ids), self.outputs[tuple(row.ids)])

    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        trees = []
        for row in rows:
            tree, at, (prompt, output) = TokenTree.root(row.ids[-1]), 0, row.state
            for token in output[len(row.ids) - prompt :][: min(row.room, 4)]:
                wrong, after = ((token + step) % self.target.vocab_size for step in (1, 2))
                tree.add(wrong, at, self.source)
                at, before = tree.add(token, at, self.source), at
                tree.add(after, before, self.source)
            trees.append(tree)
        return trees


def examine(kind: str, model: PreTrainedModel | None = None) -> Finding:
    """Build, load and decode one architecture.

    Args:
        model: instead of a new one of this kind.
    """
    try:
        model = model or tiny_models.make(kind)
    except Exception as error:  # whatever a configuration of another make may raise
        return Finding(kind, "not built", note=first_line(error)[:100])
    try:
        target = as_target(model)
    except ModelError as error:
        return Finding(kind, "refused", note=str(error))
    finding = Finding(
        kind,
        "same",
        blocks=target.has_blocks,
        windows=any(shape.reach.window is not None for shape in target.layout.values()),
        chains=target.chains_only,
    )
    try:
        _decode(finding, model)
    except PacelineError as error:
        return Finding(kind, "refused", note=str(error))
    try:
        finding.half = "yes" if as_target(model.bfloat16()) else ""
    except ModelError as error:
        finding.half, finding.note = "refused", str(error)
    finding.tier = make_target(model.float(), tier="auto").tier  # last: fast tiers take the weights
    return finding


def _decode(finding: Finding, model: PreTrainedModel) -> None:
    """Every drafter, alone and in a batch, against the model's own output."""
    try:
        own = [_own(model, prompt) for prompt in PROMPTS]
    except Exception as error:
        raise PacelineError(f"transformers' own generate fails: {first_line(error)}") from error
    outputs = {tuple(prompt): output for prompt, output in zip(PROMPTS, own, strict=True)}
    for name in (*DRAFTERS, *(("layer-skip",) if finding.blocks else ())):
        drafter: Any = (lambda target: Siblings(target, outputs)) if name == "siblings" else f"{name}+fixed:k=4"
        llm = paceline.load(model, drafter=drafter)
        options = {"max_new_tokens": NEW, "eos": ()}
        alone = [llm.generate(prompt, **options).tokens for prompt in PROMPTS]
        batch = [output.tokens for output in llm.generate(PROMPTS, **options)]
        for prompt, wanted, *got in zip(PROMPTS, own, alone, batch, strict=True):
            for tokens in got:
                verdict = _verdict(model, prompt, wanted, tokens)
                if verdict != "same" and finding.outcome != "WRONG":
                    finding.outcome, finding.note = verdict, f"with {name.partition(':')[0]}"
        finding.ran.append(name.partition(":")[0])


@torch.inference_mode()
def _own(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    output: Any = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return output[0, len(prompt) :].tolist()


@torch.inference_mode()
def _verdict(model: PreTrainedModel, prompt: list[int], wanted: list[int], got: list[int]) -> str:
    """Whether the ids are the same; "tie" where the first different token was as likely as the wanted one."""
    if wanted == got:
        return "same"
    at = next((i for i, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), None)
    if at is None:
        return "WRONG"
    logits = model(torch.tensor([prompt + wanted[:at]])).logits[0, -1]
    apart = (logits[wanted[at]] - logits[got[at]]).abs()
    return "tie" if apart <= TIE * (logits.max() - logits.min()) else "WRONG"


class _TooLong(Exception):
    pass


def _examine_in_time(kind: str) -> Finding:
    def stop(*_: object) -> None:
        raise _TooLong

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        return examine(kind)
    except _TooLong:
        return Finding(kind, "WRONG", note=f"took more than {SECONDS} s")
    except Exception as error:  # a bare exception out of paceline is as wrong as other tokens
        return Finding(kind, "WRONG", note=f"{type(error).__name__}: {first_line(error)}")
    finally:
        signal.alarm(0)


OUTCOMES = {
    "same": "run, with the ids of `generate`",
    "tie": "run, but where two tokens tie it chose the other one",
    "WRONG": "**wrong**",
    "refused": "are refused, with the reason",
    "not built": "are not among these: no tiny model of them was built",
}


def page(findings: Sequence[Finding], command: str) -> str:
    """The findings as a page of documentation."""
    count = Counter(finding.outcome for finding in findings)
    built = len(findings) - count["not built"]
    theirs = sum("transformers" in finding.note for finding in findings if finding.outcome == "refused")
    tiers = Counter(finding.tier for finding in findings if finding.tier)
    lines = [
        "# Which architectures run",
        "",
        "Find out here whether paceline runs your model, on which tier, and with which drafters.",
        "The architectures are called as in a model's `config.json` (`model_type`).",
        "What runs layer by layer is described in [families.md](families.md).",
        "",
        "```",
        "python benchmarks/architectures.py llama gemma3_text          # some, as lines",
        f"{command}     # all of them, as this page",
        "```",
        "",
        f"Written by the second command ({datetime.now(UTC):%Y-%m-%d}, transformers {transformers.__version__}).",
        f"Each of the {len(findings)} causal architectures of transformers is tried as a tiny random model.",
        "It decodes in float32 on the CPU, one prompt at a time and as a ragged batch.",
        "The ids are compared with those of the model's own greedy `generate`.",
        f"The drafters are {', '.join(f'`{name.partition(chr(58))[0]}`' for name in DRAFTERS)}"
        " and, where layers run one by one, `layer-skip`.",
        "`siblings` proposes the truth with wrong tokens beside it.",
        "",
        "| outcome | architectures |",
        "| --- | --: |",
        *(f"| {text} | {count[outcome]} |" for outcome, text in OUTCOMES.items()),
        "",
        f"Of the {built} that were built, {count['same'] + count['tie']} run; `--tier auto` takes "
        + ", ".join(f"`{tier}` for {number}" for tier, number in tiers.most_common())
        + ".",
        f"{theirs} of the {count['refused']} refusals are for what transformers itself does, as their notes say.",
        "",
        "The columns:",
        "",
        "* *tier*: what `--tier auto` takes.",
        "* *layers*: one by one, as early exit, layer skipping and trained heads need them, or the whole forward.",
        "* *windows*: some layers see the end of the text only, or a chunk of it.",
        "* *chains*: layers with states, or positions counted by the cache: trees are cut to chains.",
        "* *bf16*: whether the same holds in bfloat16, by logits.",
        "",
        "| architecture | outcome | tier | layers | windows | chains | bf16 | notes |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for it in sorted(findings, key=lambda finding: finding.kind):
        ran = it.outcome in ("same", "tie", "WRONG") and it.ran
        layers = ("one by one" if it.blocks else "whole") if ran else ""
        marks = ["yes" if mark else "" for mark in (it.windows, it.chains)]
        note = it.note.replace("|", "/")
        lines.append(f"| {' | '.join([it.kind, it.outcome, it.tier, layers, *marks, it.half, note])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help="model types, as configurations call them; default all")
    parser.add_argument("--out", type=Path, help="write the page to this file")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("paceline").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    findings = []
    for kind in args.kinds or tiny_models.architectures():
        findings.append(_examine_in_time(kind))
        it = findings[-1]
        print(f"{it.kind:28} {it.outcome:10} {it.tier:10} {it.note}", flush=True)
    print(dict(Counter(finding.outcome for finding in findings)))
    if args.out:
        with whole(args.out) as part:
            part.write_text(page(findings, f"python benchmarks/architectures.py --out {args.out}"))


if __name__ == "__main__":
    main()
