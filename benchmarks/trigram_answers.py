"""Prompts with the model's own answers, as token ids: what `trigram_replay.py` replays.

    python benchmarks/trigram_answers.py --suite prompts.jsonl --limit 10 --out answers.jsonl
    python benchmarks/trigram_answers.py --journal RESULTS --suite prompts.jsonl --out answers.jsonl
    python benchmarks/trigram_answers.py --data FOLDER --limit 200 --out answers.jsonl

The answers are generated now, or taken from the journal of a `paceline bench` run over that suite (of its method `ar`),
or from what `paceline train data` wrote. A row is `{"id", "task", "temperature", "top_p", "prompt", "output"}`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.progress import track

import paceline
from paceline.bench.journal import CONFIG, RUNS, Run
from paceline.bench.suites import Prompt, load_suite
from paceline.training.data.samples import Shard

Row = dict[str, Any]


def generated(prompts: list[Prompt], args: argparse.Namespace) -> Iterator[Row]:
    llm = paceline.load(args.model, drafter="none", tier=args.tier)
    for index, prompt in enumerate(track(prompts, "answers")):
        ids = llm.encode(prompt.turns[0])
        if len(ids) + args.max_new_tokens <= llm.target.context:
            [request] = llm.requests(
                [ids],
                max_new_tokens=args.max_new_tokens,
                temperature=args.temperature,
                top_p=args.top_p,
                seed=args.seed + index,
            )
            for _ in llm.engine.run([request]):
                pass
            yield row(prompt.id, prompt.task, ids, request.output, args.temperature, args.top_p)


def from_journal(prompts: list[Prompt], args: argparse.Namespace) -> Iterator[Row]:
    """Of the first turns, measured at batch 1."""
    by_id = {prompt.id: prompt for prompt in prompts}
    top_p = json.loads((args.journal / CONFIG).read_text())["settings"]["top_p"]
    llm = paceline.load(args.model, drafter="none", tier=args.tier)
    for line in (args.journal / RUNS).read_text().splitlines():
        run = Run(**json.loads(line))
        if run.method == "ar" and run.turn == 0 and run.temperature == args.temperature:
            for number, output in zip(run.ids, run.outputs, strict=True):
                if number in by_id:
                    ids = llm.encode(by_id[number].turns[0])
                    yield row(number, run.task, ids, output, run.temperature, top_p)


def from_data(folder: Path, limit: int | None) -> Iterator[Row]:
    """The last answer of each sample, with all that stands before it; the last samples of the folder."""
    temperature = json.loads((folder / "manifest.json").read_text())["made"]["temperature"]
    rows = []
    for path in sorted(folder.glob("*.safetensors")):
        for number, (ids, mask) in enumerate(Shard.load(path).samples()):
            start = len(mask) - mask[::-1].index(0) if 0 in mask else 0
            if 1 < start < len(ids):  # open text has one token of prompt
                rows.append(row(f"{path.stem}/{number}", folder.name, ids[:start], ids[start:], temperature, 1.0))
    yield from rows[-(limit or 0) :]


def row(number: str, task: str, prompt: list[int], output: list[int], temperature: float, top_p: float) -> Row:
    settings = {"temperature": temperature, "top_p": top_p}
    return {"id": number, "task": task, **settings, "prompt": prompt, "output": output}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", help="as for paceline bench")
    parser.add_argument("--journal", type=Path, help="folder of a paceline bench run")
    parser.add_argument("--data", type=Path, help="folder that paceline train data wrote")
    parser.add_argument("--limit", type=int, help="first prompts of each task; last samples of a folder of data")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tier")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.data:
        rows = from_data(args.data, args.limit)
    elif args.suite:
        prompts = load_suite(args.suite, limit=args.limit)
        rows = from_journal(prompts, args) if args.journal else generated(prompts, args)
    else:
        parser.error("name a --suite, a --journal with its suite, or a folder of --data")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with args.out.open("w") as file:
        for answer in rows:
            count += 1
            file.write(json.dumps(answer) + "\n")
            file.flush()
    print(f"{count} answers in {args.out}")


if __name__ == "__main__":
    main()
