"""The field: paceline and what else decodes this model on a CPU, prompt by prompt by turns.

    python benchmarks/field/run.py --work FOLDER --out RESULTS [--peers transformers,paceline,...] [--limit 4]

Every engine loads once a temperature and then sleeps but for its turns. For each prompt all answer once, in an order
that rotates. As some learn from what they wrote, none sees a prompt twice: it warms up with another, and starts anew
for the next temperature. RESULTS gets `runs.jsonl` (a line a request, as they come), `config.json`, `results.jsonl` and
`table.md`; what cannot be installed, loaded or run is a row that says why. `--work` keeps an environment a peer between
runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from engine import Engine, EngineError
from environments import Unusable, inside, interpreter, preloaded
from peers import HF, PEERS, Peer
from summary import CONFIG, RUNS, method, summarise

HERE = Path(__file__).parent
GIB = 1 << 30
PAUSE = 0.2  # seconds between turns
WARM_UP = 8  # tokens
PLACES = ("--work", "--out", "--environment", "--interpreter")
WARM_UP_PROMPT = "Name three rivers and say where each of them begins."


class Job(NamedTuple):
    """What all are asked, and of which model."""

    prompts: list[dict[str, Any]]  # id, task, ids
    warm_up: list[int]  # token ids of a prompt that is none of them
    model: dict[str, Any]  # of an adapter's argument: name, model, gguf, eos


@dataclass
class Runner:
    """A mode that answers: its engine, and whom it belongs to."""

    peer: Peer
    mode: str
    engine: Engine


class Field:
    """The engines that could be started for one temperature, and what became of the others."""

    def __init__(
        self, options: argparse.Namespace, job: Job, settings: dict[str, Any], temperature: float, stack: ExitStack
    ) -> None:
        self.options, self.job, self.settings = options, job, settings
        self.temperature, self.stack = temperature, stack
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
            engine = self.stack.enter_context(Engine(command, log, preloaded(peer, python)))
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
        for mode in modes:
            if mode not in told["failed"]:
                self._warm_up(Runner(peer, mode, engine))
        self.memory[name] = engine.memory()
        say(f"{name}: {', '.join(f'{k} {v}' for k, v in told['versions'].items())}; {self.memory[name] / GIB:.1f} GiB")

    def _fail(self, peer: Peer, modes: Sequence[str] | dict[str, Any], why: str) -> None:
        for mode in modes:
            self.failed[method(peer.name, mode)] = why
        say(f"{peer.name} ({', '.join(modes)}): {why}")

    def _warm_up(self, runner: Runner) -> None:
        """Pages come in, threads start; who fails now is out."""
        if why := self.ask(runner, self.job.warm_up, WARM_UP, 0).get("error"):
            self._fail(runner.peer, [runner.mode], why)
        else:
            self.runners.append(runner)

    def ask(self, runner: Runner, ids: list[int], tokens: int, seed: int) -> dict[str, Any]:
        """The answer of one turn, as `protocol.py` has it; `{"error": why}` of a process that is no more, too."""
        asked = {"ids": ids, "max_new_tokens": tokens, "temperature": self.temperature, "seed": seed}
        if not runner.engine.alive:
            return {"error": "its process had ended"}
        try:
            return runner.engine.ask({"mode": runner.mode, **asked}, self.options.answer_seconds)
        except EngineError as error:
            return {"error": str(error)}

    def run(self) -> Iterator[dict[str, Any]]:
        """A row a request."""
        for number, prompt in enumerate(self.job.prompts):
            first = number * 5 % max(len(self.runners), 1)  # by more than the modes of most peers
            for runner in self.runners[first:] + self.runners[:first]:
                time.sleep(PAUSE)
                # What a process has not touched for minutes may have left the memory: that is nobody's speed.
                answer = self.ask(runner, self.job.warm_up, WARM_UP, 0)
                if "error" not in answer:
                    answer = self.ask(runner, prompt["ids"], self.options.max_new_tokens, self.options.seed + number)
                about = {"method": method(runner.peer.name, runner.mode), "temperature": self.temperature}
                yield {**about, "id": prompt["id"], "task": prompt["task"], **answer}
            say(f"temperature {self.temperature:g}: {number + 1} of {len(self.job.prompts)} prompts")


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    if (options.out / RUNS).exists():
        raise SystemExit(f"error: {options.out} has results: name another folder")
    job = prepare(options)
    for folder in (options.work, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    context = max(map(len, (job.warm_up, *(prompt["ids"] for prompt in job.prompts)))) + options.max_new_tokens + 64
    settings = {**job.model, "threads": options.threads, "context": context}
    config = described(options, settings, sys.argv[1:] if words is None else words)
    with (options.out / RUNS).open("w") as out:
        for temperature in options.temperatures:
            with ExitStack() as stack:
                field = Field(options, job, settings, temperature, stack)
                field.start([peer for peer in PEERS if peer.name in options.peers])
                config["versions"] |= field.versions
                config["memory_mb"] |= {name: size >> 20 for name, size in field.memory.items()}
                config["failed"][f"{temperature:g}"] = field.failed
                (options.out / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
                for row in field.run():
                    print(json.dumps(row), file=out, flush=True)
    print(summarise(options.out))


def prepare(options: argparse.Namespace) -> Job:
    """The prompts as token ids, with the model's chat template, and where the model's files are."""
    import paceline
    from paceline.bench.suites import load_suite
    from paceline.errors import PacelineError
    from paceline.targets.sources import resolve

    try:
        prompts = load_suite(options.suite, (), options.limit, 1)
        source = resolve(options.model)
        llm = paceline.load(options.model, drafter="none", tier="reference")
    except PacelineError as error:
        raise SystemExit(f"error: {error}") from error
    if source.gguf is None:
        raise SystemExit(f"error: {options.model} does not come from a GGUF file, which llama.cpp needs")
    model = {"name": options.model, "model": source.location, "gguf": str(source.gguf), "eos": list(llm.target.eos)}
    asked = [{"id": one.id, "task": one.task, "ids": llm.encode(one.turns[0])} for one in prompts]
    return Job(asked, llm.encode(WARM_UP_PROMPT), model)


def described(options: argparse.Namespace, settings: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """What `config.json` says; the engines' versions, memory and failures come in as they start."""
    from paceline.targets.machine import cpu

    modes = [(peer, mode) for peer in PEERS if peer.name in options.peers for mode in peer.modes]
    asked = {name: getattr(options, name) for name in ("model", "limit", "max_new_tokens", "temperatures", "threads")}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/field/run.py", *without(words, PLACES)]),
        "machine": {"cpu": cpu(), "cores": os.cpu_count(), "python": platform.python_version()},
        "settings": {**asked, "seed": options.seed, "suite": Path(options.suite).name},
        "eos": settings["eos"],
        "methods": [method(peer.name, mode) for peer, mode in modes],
        "references": {method(peer.name, mode): method(peer.reference, "plain") for peer, mode in modes},
        "versions": {},
        "memory_mb": {},
        "failed": {},
    }


def without(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """A command line's words but for some options and their values: where files lie is nobody's business."""
    kept, left_out = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        if not left_out and name not in options:
            kept.append(word)
        left_out = name in options and not equals
    return kept


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of environments and logs")
    parser.add_argument("--out", type=Path, required=True, help="new folder of results")
    parser.add_argument("--peers", default=",".join(peer.name for peer in PEERS), help="default %(default)s")
    parser.add_argument("--environment", type=pair, action="append", default=[], metavar="PEER=FOLDER", help="made")
    parser.add_argument(
        "--interpreter", type=pair, action="append", default=[], metavar="PEER=PYTHON", help="to make it"
    )
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of the engines' ends
    main()
