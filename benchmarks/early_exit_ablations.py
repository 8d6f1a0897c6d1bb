"""Ablations of EESD: what heads trained otherwise are accepted for, and what policies make of one head.

    python benchmarks/early_exit_ablations.py heads --data DATA --text FILE … --out DIR [--only NAME …] [-- OPTION …]
    python benchmarks/early_exit_ablations.py policies --answers FILE [--drafter early-exit] [--cost C]

`heads` trains a head for each row, all alike but for what the row says (what stands after `--` goes to `paceline train
early-exit`), and measures them on the same held-back samples of DATA. The row "open text only" learns as many tokens of
the files of `--text`, none of them the model's own. A command that was stopped goes on where it was; what is done is
only read. `policies` replays answers (`trigram_answers.py`) under each policy, so that all draft for the same text; its
speedup is what equation 14 predicts for a drafted token that costs C target passes (default: as measured here).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import track
from table import markdown, shown
from trained import facts, own_and_passed, train

import paceline
from paceline.bench.metrics import harmonic_mean
from paceline.drafters.early_exit.head import ExitHead
from paceline.drafting.corpus.tokenized import tokenizer_of
from paceline.policies import POLICIES
from paceline.profiling.replay import replay
from paceline.profiling.rounds import DRAFTED, round_seconds
from paceline.targets import load_target
from paceline.targets.store import sha256
from paceline.training.data.dataset import Dataset
from paceline.training.data.generate import OpenText
from paceline.training.data.samples import Manifest, shard_name, write_shard
from paceline.training.data.self_distill import DistillConfig
from paceline.training.heads.early_exit import EarlyExitTask
from paceline.training.heads.frozen_layers import FrozenLayers
from paceline.training.heads.simulated_acceptance import CHAIN
from paceline.training.trainer import TrainConfig

if TYPE_CHECKING:
    from paceline.drafting.base import Drafter

BAR = Console(stderr=True)
BASE, OPEN = "base", "open text only"  # the row that the others differ from by one thing each
HEADS: dict[str, dict[str, int]] = {
    BASE: {},
    OPEN: {},
    **{f"N = {n}": {"layers": n} for n in range(1, 7)},
    **{f"{count} exit layers": {"exit-layers": count} for count in range(6)},
}
RULES = (
    "fixed:k=3",
    "fixed:k=5",
    "fixed:k=10",  # "without Thompson sampling" in the paper
    "beta-ts",
    "beta-ts:literal=true",
    "cali-ts",
    "cali-ts:literal=true",
    "cali-ts:predict=false",  # without model prediction
    "cali-ts:calibrate=false",  # without sampling prediction
    "beta-ts:cost=auto",
    "cali-ts:cost=auto",
)


# -- heads ---------------------------------------------------------------------------------------------------------
def heads(args: argparse.Namespace) -> None:
    same = {"layers": args.layers, "exit-layers": args.exit_layers}
    names = args.only or [name for name, other in HEADS.items() if not other or other.items() - same.items()]
    for name in names:
        folder = args.out / name.replace(" ", "-")
        data = open_text(args) if name == OPEN else args.data
        words = [f"--{key}={value}" for key, value in (same | HEADS[name]).items()]
        train("early-exit", folder, ["--model", args.model, "--data", str(data), *words, *args.options])
    print(f"base: N = {args.layers}, exit layers {args.exit_layers}\n\n{table(args, names)}")


def open_text(args: argparse.Namespace) -> Path:
    """A folder of training data with as many tokens to learn as `--data` has, all from the files of `--text`."""
    folder, like = args.out / "open-text", Manifest(args.data).read()
    manifest = Manifest(folder)
    manifest.open({**like["made"], "prompts": [], "text": [[path.name, sha256(path)] for path in args.text]})
    if not (folder / shard_name(0)).exists():
        longest = like["made"]["max_length"]
        target = SimpleNamespace(context=longest, check_ids=lambda ids: None)  # training checks them
        owner: Any = SimpleNamespace(tokenizer=tokenizer_of(args.model)[0], target=target)
        config = DistillConfig(max_length=longest)
        samples = OpenText(args.text, owner, config).samples(0, like["totals"]["trained"])
        data = Dataset(args.data, max_length=longest)
        held_back = map(data.prompt, data.split(TrainConfig().held_back)[1])
        measured = tuple(prompt for prompt in held_back if prompt)  # what answers them is not to be learned
        samples = [sample for sample in samples if not tokens_of(sample.ids).startswith(measured)]
        learnt = sum(len(sample.ids) - 1 for sample in samples)
        counts = dict.fromkeys(like["totals"], 0) | {"samples": len(samples), "trained": learnt}
        write_shard(folder, 0, samples, like["made"]["top"], counts)
        manifest.add(shard_name(0), counts)
    return folder


def tokens_of(ids: list[int]) -> bytes:
    """As `Dataset.prompt` gives them."""
    return torch.tensor(ids, dtype=torch.int32).numpy().tobytes()


@torch.inference_mode()
def table(args: argparse.Namespace, names: list[str]) -> str:
    """Simulated acceptance on held-back samples of `--data`."""
    trained = facts("early-exit", args.out / names[0].replace(" ", "-")) or {}
    target, data = load_target(args.model), Dataset(args.data, max_length=trained["max_length"])
    held_back = data.batches(data.split(trained["held_back"])[1], 2048, None)
    chain = [f"accepted {n}" for n in range(1, CHAIN + 1)]
    lines = [["head", *chain, "tokens a pass at K = 5", "loss", "trained parameters"]]
    for name in track(names, "measuring", console=BAR):
        head = ExitHead.load(args.out / name.replace(" ", "-"), target)
        task = EarlyExitTask(head, FrozenLayers(target, head.config.start), "distil")
        counts = torch.stack([task.count(data.batch(samples).to(target.device)) for samples in held_back]).sum(0)
        found = task.measure(counts)
        accepted = [found[f"accepted_{n}"] for n in range(1, CHAIN + 1)]
        figures = [f"{value:.3f}" for value in accepted] + [
            f"{1 + sum(accepted):.2f}",
            f"{found['held_back_loss']:.3f}",
        ]
        lines.append([name, *figures, f"{head.parameter_counts()['total']:,}"])
    return markdown(lines)


# -- policies ------------------------------------------------------------------------------------------------------
def policies(args: argparse.Namespace) -> None:
    answers = [json.loads(line) for line in args.answers.read_text().splitlines()][: args.limit]
    llm = paceline.load(args.model, drafter=args.drafter, tier=args.tier)
    cost = measured_cost(llm.drafter) if args.cost is None else args.cost
    lines = [["policy", "tau", "v_d", "r_d", "HM", "drafted a round", f"speedup at alpha = {cost:.3f}"]]
    for rule in args.rule or RULES:
        spec, drafted, accepted, tokens, rounds = POLICIES.parse(rule), 0, 0, 0, 0
        for seed, answer in enumerate(track(answers, rule, console=BAR)):
            stats = replay(llm.drafter, answer["prompt"], answer["output"], spec.build(), target=llm.target, seed=seed)
            drafted, accepted = drafted + stats.drafted, accepted + stats.accepted
            tokens, rounds = tokens + stats.tokens, rounds + len(stats.rounds)
        v_d, r_d = accepted / drafted if drafted else None, accepted / tokens
        figures = [f"{tokens / rounds:.2f}", shown(v_d, ".2f"), f"{r_d:.2f}", f"{harmonic_mean(v_d or 0.0, r_d):.1f}"]
        lines.append([f"`{rule}`", *figures, f"{drafted / rounds:.2f}", f"{tokens / (rounds + cost * drafted):.2f}"])
    print(markdown(lines))


def measured_cost(drafter: Drafter) -> float:
    """Of a drafted token, in target passes: equation 14 knows of one cost for all."""
    costs, most = round_seconds(drafter), max(DRAFTED)
    return (costs(most) / costs(0) - 1) / most


def main() -> None:
    words, options = own_and_passed()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    trained, replayed = commands.add_parser("heads"), commands.add_parser("policies")
    for command in (trained, replayed):
        command.add_argument("--model", default="smollm2-135m")
    trained.add_argument("--data", type=Path, required=True, help="folder of paceline train data")
    trained.add_argument("--text", type=Path, nargs="+", default=[], help="open text")
    trained.add_argument("--out", type=Path, required=True, help="a folder for every head")
    trained.add_argument("--layers", type=int, default=4, help="N of the base")
    trained.add_argument("--exit-layers", type=int, default=1, help="of the base")
    trained.add_argument("--only", nargs="+", choices=list(HEADS), metavar="NAME", help=f"of {', '.join(HEADS)}")
    trained.add_argument("--held-back", type=int, default=64, help="samples to measure on, and not to train on")
    replayed.add_argument("--answers", type=Path, required=True)
    replayed.add_argument("--drafter", default="early-exit")
    replayed.add_argument("--rule", nargs="+", help="policies; default those of the paper's ablations")
    replayed.add_argument("--cost", type=float, help="of a drafted token, in target passes")
    replayed.add_argument("--limit", type=int, help="first answers only")
    replayed.add_argument("--tier", default="native")
    args = parser.parse_args(words)
    if args.command == "policies":
        policies(args)
        return
    if OPEN in (args.only or HEADS) and not args.text:
        parser.error(f"'{OPEN}' needs --text")
    args.options = [f"--held-back={args.held_back}", *options]
    heads(args)


if __name__ == "__main__":
    main()
