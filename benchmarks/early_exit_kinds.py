"""Simulated acceptance of an exit head on the samples that its training held back, by the file their prompts are from.

python benchmarks/early_exit_kinds.py --data DATA … --prompts FILE … [--head FOLDER] [--held-back N]
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import torch
from table import markdown

from paceline.drafters.early_exit.head import ExitHead
from paceline.targets import load_target
from paceline.training.data.dataset import Dataset
from paceline.training.data.prompts import read_prompts
from paceline.training.heads.early_exit import EarlyExitTask
from paceline.training.heads.frozen_layers import FrozenLayers

OTHER = "other"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="folders of paceline train data")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="files that the data was made from")
    parser.add_argument("--head", type=Path, help="default: the drafter's own")
    parser.add_argument("--held-back", type=int, default=64)
    args = parser.parse_args()
    target = load_target(args.model, tier="native")
    head = ExitHead.load(args.head or ExitHead.find(target), target)
    task = EarlyExitTask(head, FrozenLayers(target, head.config.start), "distil")
    data = Dataset(*args.data, max_length=head.config.trained.get("max_length", 1024))
    first = {conversation.turns[0]: path.name for path in args.prompts for conversation in read_prompts([path])}
    found: dict[str, list[torch.Tensor]] = defaultdict(list)
    for index in data.split(args.held_back)[1]:
        batch = data.batch([index])
        text = str(target.tokenizer.decode(batch.ids[0]))
        name = next((name for turn, name in first.items() if turn.strip() in text), OTHER)
        for key in (name, "all"):
            found[key].append(task.count(batch))
    lines = [["prompts", "samples", "first token", "first two", "the model's likeliest"]]
    for name, counts in sorted(found.items()):
        seen = task.measure(torch.stack(counts).sum(0))
        figures = (f"{seen[key]:.3f}" for key in ("accepted_1", "accepted_2", "argmax"))
        lines.append([name, str(len(counts)), *figures])
    print(markdown(lines))


if __name__ == "__main__":
    main()
