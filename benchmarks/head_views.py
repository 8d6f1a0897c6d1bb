"""What a trained EAGLE head looks at, and how far its drafts hold: three plots a head.

    python benchmarks/head_views.py [--head NAME-OR-FOLDER …] [--suite benchmarks/prompts/tuning.jsonl] [--out DIR]

Left: how much the attention of its last layer gives to a token, by how many tokens before the one it reads that stands;
a line for each attention head. Middle: the same for one text, all heads' mean: rows read, columns are read. Right: the
share of drafts whose first, second, … token the model accepts, by source, in greedy chains of four.

The model answers the prompts greedily. The attention is that of the model's own text and hidden states.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from eagle_attention import BAR, SHIPPED, eagle_states, load_eagle
from rich.progress import track
from table import markdown
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import paceline
from paceline.bench.suites import load_suite

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

HEADS = ("eagle3", "eagle-k1")
NEAR, SHOWN, DEPTH = 32, 40, 4  # tokens of the first plot and of the second; of a draft


class Weights(TorchFunctionMode):
    """Keeps the weights of the last attention that runs meanwhile, `[heads, slots, slots]`: one text, causal."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.scaled_dot_product_attention:
            queries, keys = args[0][0], args[1][0].repeat_interleave(args[0].shape[1] // args[1].shape[1], 0)
            scores = queries @ keys.transpose(-1, -2) * queries.shape[-1] ** -0.5
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            self.kept = scores.masked_fill(later, -torch.inf).softmax(-1)
        return function(*args, **(kwargs or {}))


def attended(head: Any, read: Tensor, ids: Tensor) -> np.ndarray:
    """Attention of the last layer at every slot to every slot, `[heads, slots, slots]`."""
    with Weights() as weights:
        head(read, ids[:, 1:])
    made: np.ndarray = weights.kept.float().numpy()
    return made


def by_distance(weights: np.ndarray) -> np.ndarray:
    """Mean weight `[heads, NEAR]` of the slot 0, 1, … before, where there are so many."""
    slots = np.arange(NEAR, weights.shape[1])
    return np.stack([weights[:, slots, slots - far].mean(-1) for far in range(NEAR)], -1)


def drafted(llm: paceline.LLM, prompts: Any, tokens: int) -> tuple[list[list[int]], dict[str, list[float]]]:
    """The texts, prompt and answer; and by task the share of drafts that hold for 1, 2, … tokens."""
    texts, held = [], defaultdict[str, list[int]](list)
    for prompt in track(prompts, "answers", console=BAR):
        [request] = llm.requests([llm.encode(prompt.turns[0])], max_new_tokens=tokens, temperature=0.0)
        for _ in llm.engine.run([request]):
            pass
        texts.append(request.ids)
        held[prompt.task] += [round.accepted for round in request.stats.rounds if round.depth == DEPTH]
    held["all"] = [count for counts in held.values() for count in counts]
    return texts, {task: [float(np.mean(np.array(c) >= n)) for n in range(1, DEPTH + 1)] for task, c in held.items()}


def draw_distances(axes: Axes, near: np.ndarray, first: float) -> None:
    axes.plot(near.T, linewidth=0.8, alpha=0.5)
    axes.plot(near.mean(0), color="black", linewidth=2, label="mean of its heads")
    axes.set(xlabel="tokens before the one it reads", ylabel="attention", title="By distance", ylim=(0, None))
    axes.legend(title=f"to the text's first token: {first:.2f}", frameon=False)


def draw_text(axes: Axes, weights: np.ndarray, words: list[str]) -> None:
    axes.imshow(weights, cmap="magma_r", vmin=0, vmax=np.quantile(weights, 0.99))
    axes.set_xticks(range(len(words)), words, rotation=90, fontsize=5)
    axes.set_yticks(range(len(words)), words, fontsize=5)
    axes.set_title("In one text")


def draw_acceptance(axes: Axes, held: dict[str, list[float]]) -> None:
    for task, shares in held.items():
        style: dict[str, Any] = {"color": "black", "linewidth": 2} if task == "all" else {}
        axes.plot(range(1, DEPTH + 1), shares, marker="o", label=task.replace("_", " "), **style)
    axes.set(xlabel="token of a draft", ylabel="accepted so far", title="How far drafts hold", ylim=(0, 1))
    axes.set_xticks(range(1, DEPTH + 1))
    axes.legend(frameon=False)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--head", nargs="+", default=HEADS, help=f"folders, or of {', '.join(HEADS)}")
    parser.add_argument("--suite", default="benchmarks/prompts/tuning.jsonl", help="as for paceline bench")
    parser.add_argument("--limit", type=int, help="first prompts of each task")
    parser.add_argument("--tier", default="native")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder of head-NAME.svg")
    args = parser.parse_args()
    from matplotlib.figure import Figure

    prompts, table = load_suite(args.suite, limit=args.limit), [["head", "source", *map(str, range(1, DEPTH + 1))]]
    for name in args.head:
        folder = SHIPPED / name if name in HEADS else Path(name)
        llm = paceline.load(args.model, drafter=f"eagle:head={folder}", policy=f"fixed:k={DEPTH}", tier=args.tier)
        texts, held = drafted(llm, prompts, args.max_new_tokens)
        head = load_eagle(folder, llm.target)
        seen = []
        for text in texts:
            ids = torch.tensor([text])
            seen.append(attended(head, eagle_states(head, llm.target, ids), ids))
        figure = Figure(figsize=(15, 5), layout="constrained")
        left, middle, right = figure.subplots(1, 3)
        near = np.mean([by_distance(weights) for weights in seen if weights.shape[1] > NEAR], 0)
        draw_distances(left, near, float(np.mean([weights[:, NEAR:, 0].mean() for weights in seen])))
        words = [str(llm.tokenizer.decode([token])).replace("\n", "⏎") for token in texts[0][-SHOWN:]]
        draw_text(middle, seen[0].mean(0)[-SHOWN:, -SHOWN:], words)
        draw_acceptance(right, held)
        figure.suptitle(f"{folder.name}: {len(texts)} prompts of {Path(args.suite).stem}")
        figure.savefig(args.out / f"head-{folder.name}.svg", metadata={"Date": None})
        table += [[f"`{folder.name}`", task, *(f"{share:.3f}" for share in shares)] for task, shares in held.items()]
    print(markdown(table))


if __name__ == "__main__":
    main()
