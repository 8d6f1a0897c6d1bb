"""The field: paceline and what else decodes this model on a CPU, prompt by prompt by turns.

    python benchmarks/field/run.py --work FOLDER --out RESULTS [--peers transformers,paceline,...] [--limit 4]

Every engine loads once and then sleeps but for its turns. For each prompt and temperature all answer once, in an order
that rotates. RESULTS gets `runs.jsonl` (a line a request, as they come), `config.json`, `results.jsonl` and `table.md`;
what cannot be installed, loaded or run is a row that says why. `--work` keeps an environment a peer between runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from engine import Engine, EngineError
from environments import Unusable, inside, interpreter
from peers import HF, PEERS, Peer
from summary import RUNS, method, summarise

HERE = Path(__file__).parent
GIB = 1 << 30
PAUSE = 0.2  # seconds between turns
WARM_UP = 8  # tokens
Say = Callable[[str], None]


class Job(NamedTuple):
    """What all are asked, and of which model."""

    prompts: list[dict[str, Any]]  # id, task, ids
    model: dict[str, Any]  # of an adapter's argument: name, model, gguf, eos


@dataclass
class Runner:
    """A mode that answers: its engine, and whom it belongs to."""

    peer: Peer
    mode: str
    engine: Engine


class Field:
    """The engines that could be started, and what became of the others."""

    def __init__(self, options: argparse.Namespace, settings: dict[str, Any], stack: ExitStack, say: Say) -> None:
        self.options, self.settings, self.stack, self.say = options, settings, stack, say
        self.runners: list[Runner] = []
        self.failed: dict[str, str] = {}
        self.versions: dict[str, dict[str, str]] = {}
        self.memory: dict[str, int] = {}

    def start(self, peers: Sequence[Peer]) -> None:
        for peer in peers:
            try:
                python = self._python(peer)
            except Unusable as error:
                self._fail(peer, peer.modes, str(error))
                continue
            groups = [{name: options} for name, options in peer.modes.items()] if peer.alone else [peer.modes]
            for modes in groups:
                self._load(peer, python, modes)

    def _python(self, peer: Peer) -> Path:
        if peer.name in self.options.environment:
            return inside(Path(self.options.environment[peer.name]))
        return interpreter(peer, self.options.work, self.options.interpreter.get(peer.name, sys.executable))

    def _load(self, peer: Peer, python: Path, modes: dict[str, Any]) -> None:
        used = sum(self.memory.values())
        if used > self.options.memory * GIB:
            self._fail(peer, modes, f"not started: {used / GIB:.1f} GiB are in use, --memory {self.options.memory}")
            return
        name = method(peer.name, next(iter(modes))) if peer.alone else peer.name
        log = self.options.work / "logs" / f"{name.replace(':', '-').replace(' ', '')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [str(python), str(HERE / peer.adapter), json.dumps({**self.settings, "modes": modes})]
        try:
            engine = self.stack.enter_context(Engine(command, log))
            told = engine.ready(self.options.load_seconds)
        except (EngineError, OSError) as error:
            self._fail(peer, modes, str(error))
            return
        if "error" in told:
            engine.close()
            self._fail(peer, modes, told["error"])
            return
        self.versions[peer.name] = told["versions"]
        for mode, why in told["failed"].items():
            self._fail(peer, [mode], why)
        self.runners += [Runner(peer, mode, engine) for mode in modes if mode not in told["failed"]]
        self.memory[name] = engine.memory()
        self.say(f"{name}: {', '.join(f'{k} {v}' for k, v in told['versions'].items())}; {self.memory[name] / GIB:.1f} GiB")

    def _fail(self, peer: Peer, modes: Sequence[str] | dict[str, Any], why: str) -> None:
        for mode in modes:
            self.failed[method(peer.name, mode)] = why
        self.say(f"{peer.name} ({', '.join(modes)}): {why}")

    def ask(self, runner: Runner, prompt: dict[str, Any], tokens: int, temperature: float, seed: int) -> dict[str, Any]:
        """The answer of one turn, as `protocol.py` has it; `{"error": why}` of a process that is no more, too."""
        asked = {"ids": prompt["ids"], "max_new_tokens": tokens, "temperature": temperature, "seed": seed}
        if not runner.engine.alive:
            return {"error": "its process had ended"}
        try:
            return runner.engine.ask({"mode": runner.mode, **asked}, self.options.answer_seconds)
        except EngineError as error:
            return {"error": str(error)}

    def warm_up(self, prompt: dict[str, Any]) -> None:
        """Pages come in, threads start; who fails now is out."""
        for runner in list(self.runners):
            for temperature in self.options.temperatures:
                if why := self.ask(runner, prompt, WARM_UP, temperature, 0).get("error"):
                    self._fail(runner.peer, [runner.mode], why)
                    self.runners.remove(runner)
                    break

    def run(self, prompts: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """A row a request."""
        turn = 0
        for number, prompt in enumerate(prompts):
            for temperature in self.options.temperatures:
                first = turn % max(len(self.runners), 1)
                turn += 1
                for runner in self.runners[first:] + self.runners[:first]:
                    time.sleep(PAUSE)
                    seed = self.options.seed + number
                    answer = self.ask(runner, prompt, self.options.max_new_tokens, temperature, seed)
                    about = {"method": method(runner.peer.name, runner.mode), "peer": runner.peer.name}
                    about |= {"mode": runner.mode, "id": prompt["id"], "task": prompt["task"]}
                    yield {**about, "temperature": temperature, **answer}
            self.say(f"{number + 1} of {len(prompts)} prompts")


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    work_of_before = options.out / RUNS
    if work_of_before.exists():
        raise SystemExit(f"error: {options.out} has results: name another folder")
    job = prepare(options)
    context = max(len(prompt["ids"]) for prompt in job.prompts) + options.max_new_tokens + 64
    settings = {**job.model, "threads": options.threads, "context": context}
    with ExitStack() as stack, work_of_before.open("w") as out:
        field = Field(options, settings, stack, say)
        field.start([peer for peer in PEERS if peer.name in options.peers])
        field.warm_up(job.prompts[0])
        write_config(options, field, words)
        for row in field.run(job.prompts):
            print(json.dumps(row), file=out, flush=True)
    print(summarise(options.out))


def prepare(options: argparse.Namespace) -> Job:
    """The prompts as token ids, with the model's chat template, and where the model's files are."""
    import paceline
    from paceline.bench.suites import load_suite
    from paceline.targets.sources import resolve

    source = resolve(options.model)
    llm = paceline.load(options.model, drafter="none", tier="reference")
    prompts = load_suite(options.suite, (), options.limit, 1)
    model = {"name": options.model, "model": source.location, "eos": list(llm.target.eos)}
    model["gguf"] = str(source.gguf) if source.gguf else None
    return Job([{"id": one.id, "task": one.task, "ids": llm.encode(one.turns[0])} for one in prompts], model)


def write_config(options: argparse.Namespace, field: Field, words: Sequence[str] | None) -> None:
    from paceline.targets.machine import cpu

    config = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/field/run.py", *(sys.argv[1:] if words is None else words)]),
        "machine": {"cpu": cpu(), "cores": os.cpu_count(), "python": platform.python_version()},
        "settings": {
            name: getattr(options, name) if name != "suite" else Path(options.suite).name
            for name in ("model", "suite", "limit", "max_new_tokens", "temperatures", "threads", "seed")
        },
        "methods": [method(peer.name, mode) for peer in PEERS if peer.name in options.peers for mode in peer.modes],
        "references": {method(peer.name, mode): plain(peer) for peer in PEERS for mode in peer.modes},
        "versions": field.versions,
        "memory_mb": {name: size >> 20 for name, size in field.memory.items()},
        "failed": field.failed,
        "eos": field.settings["eos"],
    }
    (options.out / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def plain(peer: Peer) -> str:
    """The method whose greedy ids a peer's are held against."""
    return method(peer.reference, "plain")


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of environments and logs")
    parser.add_argument("--out", type=Path, required=True, help="new folder of results")
    parser.add_argument("--peers", default=",".join(peer.name for peer in PEERS), help="default %(default)s")
    parser.add_argument("--environment", type=pair, action="append", default=[], metavar="PEER=FOLDER", help="made")
    parser.add_argument("--interpreter", type=pair, action="append", default=[], metavar="PEER=PYTHON", help="to make it")
    parser.add_argument("--model", default="smollm2-135m", help="named model that comes from a GGUF file")
    parser.add_argument("--suite", default=str(HERE.parent / "prompts" / "tuning.jsonl"))
    parser.add_argument("--limit", type=int, help="first prompts of each task")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperatures", default="0,0.7", help="default %(default)s")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", type=float, default=20, help="GiB above which no more engines are started")
    parser.add_argument("--load-seconds", type=float, default=600)
    parser.add_argument("--answer-seconds", type=float, default=300)
    options = parser.parse_args(words)
    options.peers = options.peers.split(",")
    if unknown := set(options.peers) - {peer.name for peer in PEERS}:
        parser.error(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(peer.name for peer in PEERS)}")
    options.temperatures = [float(one) for one in options.temperatures.split(",")]
    options.environment, options.interpreter = dict(options.environment), dict(options.interpreter)
    if HF not in options.peers:
        parser.error(f"{HF} has to take part: others are held against it")
    return options


def pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"PEER=PATH, not {text!r}")
    return name, value


def say(line: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
