"""What training an EAGLE-3 head costs with products in float32 and in bfloat16, by turns, and whether it learns alike.

    python benchmarks/training_speed.py --data FOLDER [--steps 40]

Both start from the same weights and see the same batches. Time is the process's CPU time, which other programs on the
machine disturb little; the frozen layers' states are read from files, made before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from table import markdown

from paceline.training.heads.eagle import Eagle3Options, prepare_eagle3
from paceline.training.heads.prepare import TrainingPlan
from paceline.training.trainer import TrainConfig, Trainer

PRECISIONS = {"float32": False, "bfloat16": True}


class Turn:
    """A training that is run some steps at a time."""

    def __init__(self, model: str, data: list[Path], options: Eagle3Options, trainer: TrainConfig, half: bool) -> None:
        made = prepare_eagle3(model, data, options, TrainingPlan(trainer, torch.device("cpu")))
        self.data, self.seconds, self.losses = made.data, list[float](), list[float]()
        with tempfile.TemporaryDirectory() as folder:
            self.trainer = Trainer(made.task, made.data, trainer, Path(folder), Accelerator(cpu=True), half=half)

    def run(self, steps: int) -> None:
        at = self.trainer.step
        for passes in self.trainer.steps[at : at + steps]:
            tokens = sum(int(self.data.lengths[index]) for samples in passes for index in samples)
            began = time.process_time()
            losses, _ = self.trainer._step(passes)
            self.trainer.step += 1
            self.seconds.append((time.process_time() - began) / tokens)
            self.losses.append(next(iter(losses.values())))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", type=Path, action="append", required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--turn", type=int, default=5, help="steps at a time")
    parser.add_argument("--rollout", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    options = Eagle3Options(vocab=7168, objective="whole", rollout=args.rollout)
    config = TrainConfig(steps=args.steps, held_back=64)
    turns = {name: Turn(args.model, args.data, options, config, half) for name, half in PRECISIONS.items()}
    for _ in range(0, args.steps, args.turn):
        for turn in turns.values():
            turn.run(args.turn)
    found = {
        name: {
            "cpu_seconds_per_million_tokens": statistics.median(turn.seconds) * 1e6,
            "loss_first": turn.losses[0],
            "loss_last_tenth": statistics.mean(turn.losses[-max(1, args.steps // 10) :]),
        }
        for name, turn in turns.items()
    }
    rows = [["products", "CPU s per million tokens", "loss of the first step", "of the last tenth"]]
    rows += [[name, *(f"{value:.4g}" for value in facts.values())] for name, facts in found.items()]
    ratio = found["float32"]["cpu_seconds_per_million_tokens"] / found["bfloat16"]["cpu_seconds_per_million_tokens"]
    print(f"{markdown(rows)}\n\nbfloat16 is {ratio:.2f} times as fast")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
