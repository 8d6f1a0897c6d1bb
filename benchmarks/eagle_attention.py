"""What the attention of trained heads is worth: first-token acceptance with it, and with its output set to zero.

    python benchmarks/eagle_attention.py [--suite benchmarks/prompts/tuning.jsonl] [--head NAME-OR-FOLDER …]

The model answers the prompts greedily; then each head guesses, from every position of the answers, the next token. What
it reads is the model's own text and hidden states throughout (teacher forcing), so that nothing depends on a policy.
Without attention a layer is a multi-layer perceptron of one position. `early-exit`, whose layer was copied from the
model, stands beside the EAGLE heads: what a layer loses whose attention works.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from table import markdown
from torch import Tensor

import paceline
from paceline.bench.suites import load_suite
from paceline.drafters.eagle.eagle3_head import Eagle3Head
from paceline.drafters.eagle.formats import embedding_rows
from paceline.drafters.eagle.head import EagleHead
from paceline.drafters.early_exit.head import ExitHead
from paceline.drafting.output_rows import output_rows
from paceline.targets.families import FAMILIES
from paceline.targets.span import Span

if TYPE_CHECKING:
    from paceline.targets.target import Target

BAR = Console(stderr=True)
SHIPPED = Path(paceline.__file__).parent / "checkpoints" / "smollm2-135m"
HEADS = ("eagle3", "eagle-k1", "eagle-k2-adv", "early-exit")
OUTPUTS = ("o_proj", "dense")  # of the families' attention: what makes its output
Guess = Callable[[Tensor], Tensor]  # the token that a draft begins with, for each of the last positions of a text


def load_eagle(folder: Path, target: Target) -> Any:
    """An EAGLE head of either form that knows the target's matrices."""
    fused = (folder / "eagle3.json").exists()
    head: EagleHead | Eagle3Head = (Eagle3Head if fused else EagleHead).load(folder, target)
    head.embedding = embedding_rows(target, torch.arange(target.vocab_size))
    head.matrix = output_rows(target, head.tokens) if head.matrix is None else head.matrix
    return head


def eagle_states(head: Any, target: Target, ids: Tensor) -> Tensor:
    """What the head reads of the target at every position of texts."""
    span = Span(ids, np.zeros(1, dtype=np.int64))
    if isinstance(head, Eagle3Head):
        return torch.cat([hidden(target, span, tap) for tap in head.reads], -1)
    return target.features(hidden(target, span, target.num_layers))


def eagle(folder: Path, target: Target) -> tuple[Any, Guess]:
    head = load_eagle(folder, target)

    def guess(ids: Tensor) -> Tensor:
        # At t the head reads the target's states there and token t + 1, and guesses token t + 2.
        read = eagle_states(head, target, ids)
        return chosen(head, head.outputs(head(read, ids[:, 1:]))[0])

    return head, guess


def early_exit(folder: Path, target: Target) -> tuple[Any, Guess]:
    head = ExitHead.load(folder, target)

    def guess(ids: Tensor) -> Tensor:
        span = Span(ids, np.zeros(1, dtype=np.int64))
        return chosen(head, head(hidden(target, span, head.config.start))[0])

    return head, guess


def hidden(target: Target, span: Span, layers: int) -> Tensor:
    """What leaves the target's first `layers` layers."""
    return target.layers(target.embed(span), span, target.new_cache(*span.ids.shape), 0, layers)


def chosen(head: Any, logits: Tensor) -> Tensor:
    best = logits.argmax(-1)
    return best if head.tokens is None else head.tokens[best]


def answered(llm: paceline.LLM, suite: str, limit: int | None, tokens: int) -> list[tuple[list[int], int]]:
    """The prompts with the model's greedy answers, and how long each prompt is."""
    texts = []
    for prompt in track(load_suite(suite, limit=limit), "answers", console=BAR):
        ids = llm.encode(prompt.turns[0])
        [request] = llm.requests([ids], max_new_tokens=tokens, temperature=0.0)
        for _ in llm.engine.run([request]):
            pass
        texts.append((request.ids, len(ids)))
    return texts


def right(guess: Guess, texts: Sequence[tuple[list[int], int]]) -> Tensor:
    """Whether the first drafted token is the model's, for every root among the answers' tokens."""
    found = []
    for ids, prompt in track(texts, "guessing", console=BAR):
        guesses = guess(torch.tensor([ids]))  # the last one is of the token after the text
        count = len(ids) - prompt - 1
        found.append(guesses[-count - 1 : -1] == torch.tensor(ids[-count:]))
    return torch.cat(found)


@torch.no_grad()
def silence(head: Any) -> None:
    """Set what the attention of all layers adds to zero."""
    family = FAMILIES[head.lm.config.model_type]
    for layer in head.decoder.layers:
        for name, weight in getattr(layer, family.attention).named_parameters():
            if name.split(".")[0] in OUTPUTS:
                weight.zero_()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--suite", default="benchmarks/prompts/tuning.jsonl", help="as for paceline bench")
    parser.add_argument("--limit", type=int, help="first prompts of each task")
    parser.add_argument("--head", nargs="+", default=HEADS, help=f"folders, or of {', '.join(HEADS)}")
    parser.add_argument("--tier", default="native")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    args = parser.parse_args()
    llm = paceline.load(args.model, drafter="none", tier=args.tier)
    texts = answered(llm, args.suite, args.limit, args.max_new_tokens)
    lines = [["head", "first token", "attention silent", "lost", "right only with it", "right only without"]]
    for name in args.head:
        folder = SHIPPED / name if name in HEADS else Path(name)
        if name == "early-exit":
            folder = SHIPPED
        make = early_exit if (folder / "early-exit.json").exists() else eagle
        head, guess = make(folder, llm.target)
        whole = right(guess, texts)
        silence(head)
        without = right(guess, texts)
        a, b = float(whole.float().mean()), float(without.float().mean())
        only = [str(int((one & ~other).sum())) for one, other in ((whole, without), (without, whole))]
        lines.append([f"`{name}`", f"{a:.3f}", f"{b:.3f}", f"{a - b:+.3f}", *only])
    print(f"{len(texts)} prompts, {len(whole):,} positions\n\n{markdown(lines)}")


if __name__ == "__main__":
    main()
