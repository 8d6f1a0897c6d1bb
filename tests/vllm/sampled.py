"""vLLM with paceline's drafters at a temperature: what comes is distributed as the model says.

    python tests/vllm/sampled.py [--temperature 0.7] [--draws 800] [--method suffix:budget=4+fixed:k=4|ngram|plain]

vLLM continues one prompt many times by four tokens, of which drafts have a part in the last three. How often each
beginning came is held against the model's own probabilities, by a chi-square test. Exit status 1: they differ (p below
0.001), no draft was accepted, or none refused; or, as a control, the same counts fit another temperature too. `ngram`
is vLLM's own drafter: where it fails, vLLM's sampling does, whatever drafts (docs/vllm-drafters.md).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections import Counter
from pathlib import Path

import torch
from check import HERE, environment
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

import paceline
from drafters import asked_of
from paceline.targets.sources import resolve

TEXT = "yes no yes yes no no yes no yes no yes yes no yes no no yes no yes no"
LENGTH, AT_A_TIME, DRAFT = 4, 16, 4
FEWEST = 5.0  # expected of a kind; rarer ones are counted together
LEVEL = 0.001
OTHER = 1.0  # temperature of the control
PLAIN = "plain"  # without drafts

Beginning = tuple[int, ...]


def main() -> None:
    options = parse()
    llm = paceline.load(options.model, drafter="none")
    prompt = [int(token) for token in llm.tokenizer.encode(TEXT)]
    location = resolve(options.model).location
    speculative, engine = asked_of(options.method, DRAFT) if options.method != PLAIN else (None, {})
    asked = {"model": location, "speculative": speculative, "engine": engine, "prompts": [prompt] * options.draws}
    asked |= {"tokens": LENGTH, "concurrency": [AT_A_TIME], "temperature": options.temperature}
    path = os.pathsep.join([str(Path(paceline.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [options.python or environment(), HERE / "serve.py"],
        input=json.dumps(asked),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    [found] = json.loads(done.stdout)
    came = Counter(tuple(ids) for ids in found["ids"])
    accepted, drafted = int(sum(found.get("accepted", ()))), int(found.get("drafted", 0))
    model = AutoModelForCausalLM.from_pretrained(location, dtype=torch.float32)
    fits = {}
    for temperature in (options.temperature, OTHER):
        expected = beginnings(model, prompt, temperature, FEWEST / options.draws)
        fits[temperature] = probability(came, expected, options.draws)
        print(f"temperature {temperature:g}: p = {fits[temperature]:.3g} over {len(expected)} kinds")
    print(f"{accepted} of {drafted} drafted tokens accepted, {len(came)} different continuations")
    good = fits[options.temperature] >= LEVEL > fits[OTHER] and (options.method == PLAIN or 0 < accepted < drafted)
    raise SystemExit(0 if good else 1)


@torch.inference_mode()
def beginnings(model: torch.nn.Module, prompt: list[int], temperature: float, least: float) -> dict[Beginning, float]:
    """Probability of each continuation of `LENGTH` tokens that is at least so likely."""
    found: dict[Beginning, float] = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        logits = model(torch.tensor([[*prompt, *ids] for ids in found])).logits[:, -1]
        for (ids, before), row in zip(found.items(), torch.softmax(logits.double() / temperature, -1), strict=True):
            likely = (before * row >= least).nonzero().flatten().tolist()
            longer |= {(*ids, token): before * float(row[token]) for token in likely}
        found = longer
    return found


def probability(came: Counter[Beginning], expected: dict[Beginning, float], draws: int) -> float:
    """Of counts at least so far from what is expected, if they are drawn from it."""
    counts, sizes = [came[ids] for ids in expected], [draws * share for share in expected.values()]
    counts.append(draws - sum(counts))
    sizes.append(draws - sum(sizes))
    return float(chisquare(counts, sizes).pvalue)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="named model or folder with safetensors")
    parser.add_argument("--method", default="suffix:budget=4+fixed:k=4")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--draws", type=int, default=800)
    parser.add_argument("--python", type=Path, help="an interpreter that has vLLM, instead of a new environment")
    return parser.parse_args()


if __name__ == "__main__":
    main()
