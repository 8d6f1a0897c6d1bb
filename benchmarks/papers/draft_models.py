"""Smaller models of the default model's tokenizer, to draft for it: what the papers' small models are here.

    python benchmarks/papers/draft_models.py --out drafts [--layers 28,26,24,20]

`drafts/exit-head` is the first layers with the trained exit head (`paceline export draft-model`). `drafts/layers-N` are
N of the model's layers, as they are: those that change the hidden state most on the tuning prompts (block influence:
Men et al., ShortGPT, 2024), and the last. Nothing is trained. Folders that are there are kept.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from measured import TUNING, markdown
from torch.nn import ModuleList
from torch.nn.functional import cosine_similarity
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.drafters.early_exit.export import export_draft_model
from paceline.drafters.early_exit.head import ExitHead
from paceline.errors import PacelineError
from paceline.files import whole_folder
from paceline.targets import as_target
from paceline.targets.loading import quiet
from paceline.targets.sources import load_model, resolve

EXIT_HEAD = "exit-head"


@torch.inference_mode()
def influence(model: Any, tokenizer: Any, texts: list[str]) -> list[float]:
    """Of each layer but the last: 1 less the mean cosine between what enters and what leaves it."""
    sums, tokens = torch.zeros(model.config.num_hidden_layers - 1), 0
    for text in texts:
        states = model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states[:-1]
        sums += torch.stack([cosine_similarity(a[0], b[0], dim=-1).sum() for a, b in pairwise(states)])
        tokens += states[0].shape[1]
    return (1 - sums / tokens).tolist()


def most_influential(scores: list[float], count: int) -> list[int]:
    """`count` layers in their order: the last one, which has no score, and of the others those with the highest."""
    best = sorted(range(len(scores)), key=lambda layer: -scores[layer])[: count - 1]
    return [*sorted(best), len(scores)]


def make(name: str, folder: Path, args: argparse.Namespace) -> None:
    with quiet():
        model, tokenizer = load_model(args.model)
        if name == EXIT_HEAD:
            export_draft_model(model, tokenizer, ExitHead.load(ExitHead.find(as_target(model))), folder)
            return
        texts = [json.loads(line)["turns"][0] for line in TUNING.read_text().splitlines()]
        kept = most_influential(influence(model, tokenizer, texts), int(name.rpartition("-")[2]))
        model.base_model.layers = ModuleList(model.base_model.layers[layer] for layer in kept)
        model.config.num_hidden_layers = len(kept)
        with whole_folder(folder) as path:
            model.save_pretrained(path)
            tokenizer.save_pretrained(path)


def size(folder: str | Path) -> tuple[int, int]:
    """Layers and parameters of the model there."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return config.num_hidden_layers, AutoModelForCausalLM.from_config(config).num_parameters()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--layers", default="28,26,24,20", type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--out", type=Path, required=True, help="folder of the folders")
    args = parser.parse_args()
    try:
        depth, whole = size(resolve(args.model).location)
        if not all(1 < count < depth for count in args.layers):
            parser.error(f"--layers: {args.model} has {depth} layers, so name numbers from 2 to {depth - 1}")
        lines = [["draft model", "layers", "parameters, million", "of the target's"]]
        for name in (EXIT_HEAD, *(f"layers-{count}" for count in args.layers)):
            if not (args.out / name).exists():
                make(name, args.out / name, args)
            layers, parameters = size(args.out / name)
            lines.append([f"`{name}`", str(layers), f"{parameters / 1e6:.1f}", f"{parameters / whole:.2f}"])
    except PacelineError as error:
        raise SystemExit(f"error: {error}") from error
    print(markdown(lines))


if __name__ == "__main__":
    main()
