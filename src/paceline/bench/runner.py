"""The benchmark: every method over every prompt, interleaved, resumable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.api import load
from paceline.bench.endpoints import measure_endpoints
from paceline.bench.exactness import Difference, diverge, measure_noise
from paceline.bench.journal import DIFFERENCES, RESULTS, SAMPLES, Journal, Run, open_journal
from paceline.bench.machine import machine
from paceline.bench.methods import AR, Method, build_method, is_baseline
from paceline.bench.metrics import ResultRow, results
from paceline.bench.report import write_report
from paceline.bench.samples import SampleAnswer, sample
from paceline.bench.schedule import Item, items, measure, progress
from paceline.bench.suites import Prompt, batches, load_suite
from paceline.bench.tracing import TRACE, write_trace
from paceline.errors import ContextOverflow
from paceline.profiling.trace import TracedText
from paceline.targets.costs import stored_profile
from paceline.targets.sources import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from paceline.bench.config import BenchConfig

WARM_UP_TOKENS = 8
NOISE_PROMPTS = 4


@dataclass(frozen=True)
class Summary:
    """What `run` gives: the rows of `results.jsonl`, the differences between greedy outputs, and the config as written
    to `config.json`, all of them in the folder `out`.
    """

    out: Path
    rows: list[ResultRow]
    differences: list[Difference]
    config: dict[str, Any]


def run(config: BenchConfig) -> Summary:
    """Measure, or finish measuring, what `config` says; writes `runs.jsonl` as it goes, `results.jsonl`
    and the report at the end.

    Methods take turns prompt by prompt (batch by batch), each time another one first, so that a machine that slows
    down or warms up is unfair to none. A run that was killed goes on where it was.

    Raises:
        OptionError, ModelError, ContextOverflow: before anything is measured.
        EndpointError: a server does not answer, or refuses.
    """
    prompts = load_suite(config.suite, config.tasks, config.limit, config.turns)
    settings = config.settings() | {"prompts": len(prompts), "prompts_sha256": _fingerprint(prompts)}
    with open_journal(Path(config.out), settings, machine(config.device)) as journal:
        traced = config.trace and not (journal.folder / TRACE).exists()
        if config.endpoints:
            measure_endpoints(config, prompts, journal)
        elif traced or not journal.complete:
            _Bench(config, prompts, journal).run(traced)
        write_report(journal.folder)
        return Summary(journal.folder, journal.read(RESULTS), journal.read(DIFFERENCES), journal.config)


class _Bench:
    def __init__(self, config: BenchConfig, prompts: list[Prompt], journal: Journal) -> None:
        self.config, self.journal = config, journal
        self.names: Sequence[str] = tuple(config.methods)
        source: dict[str, Any] = {"tier": config.tier, "dtype": config.dtype, "device": config.device}
        source |= {"exact": config.exact, "fresh": config.fresh, "verifier": config.verifier}
        asked: dict[str, Any] = {
            "device_map": config.device_map,
            "quantization_config": config.quantization,
            "attn_implementation": config.attn_implementation,
            "adapter": config.adapter,
        }
        self.options = {name: value for name, value in asked.items() if value is not None}
        self.llm = load(config.model, drafter="none", **source, **self.options)
        self.hf_model = cache(self._hf_model)
        self.batches = batches(prompts, config.batch)
        target = self.llm.target
        journal.settle(tier=target.tier, dtype=str(target.compute_dtype).removeprefix("torch."), exact=target.exact)
        journal.note(profile=stored_profile(target))
        self._check_fits(prompts)

    def run(self, traced: bool) -> None:
        temperatures, asked = self.config.each_temperature, list(self._items())
        methods = self._methods()
        with progress(self.config.progress, asked, self.names, self.journal) as show:
            self._warm_up(methods, temperatures)
            show(description="measuring the noise")
            self._measure_noise()
            for temperature in temperatures:
                if temperature != temperatures[0]:
                    show(description="warming up")
                    methods.clear()  # drafters remember, and have heard these prompts' answers
                    methods += self._methods()
                    self._warm_up(methods, [temperature])
                here = [item for item in asked if item.temperature == temperature]
                measure(methods, here, self.journal, self._call, show)
        differences = list(self._differences())
        self.journal.write(DIFFERENCES, differences)
        runs = [self.journal.runs[item.key(name)] for item in self._items() for name in self.names]
        self.journal.write(SAMPLES, self._samples())
        self.journal.write(RESULTS, results(runs, differences, self.names, self.config.batch, self._is_compared))
        if traced:
            self._trace(runs)

    def _methods(self) -> list[Method]:
        return [build_method(name, self.llm, self.hf_model) for name in self.names]

    # -- what is measured ------------------------------------------------------------------------------------------
    def _items(self) -> Iterator[Item]:
        return items(self.batches, self.config)

    def _call(self, method: Method, item: Item) -> Run:
        ids = self._encode(item)
        made = method.generate(ids, self.config.sampling(item.temperature), item.seed)
        if not self._is_sample(item):
            made.trees = None
        return item.run(method.name, made, [len(prompt) for prompt in ids])

    def _encode(self, item: Item) -> list[list[int]]:
        """Token ids of the turn's prompts. The answers before it are those of one method, plain decoding if it is
        there, so that all methods continue the same text.
        """
        teller = AR if AR in self.names else self.names[0]
        earlier = [self.journal.runs[item._replace(turn=turn).key(teller)].outputs for turn in range(item.turn)]
        texts = [
            [str(self.llm.tokenizer.decode(ids, skip_special_tokens=True)) for ids in answers] for answers in earlier
        ]
        return [self._chat(prompt, [answers[row] for answers in texts]) for row, prompt in enumerate(item.prompts)]

    def _chat(self, prompt: Prompt, answers: Sequence[str]) -> list[int]:
        if not answers:
            return self.llm.encode(prompt.turns[0])
        messages = [{"role": "user", "content": prompt.turns[0]}]
        for answer, question in zip(answers, prompt.turns[1:], strict=False):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        return self.llm.encode(messages)

    # -- before ----------------------------------------------------------------------------------------------------
    def _check_fits(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            turns = len(prompt.turns)
            length = len(self._chat(prompt, [""] * (turns - 1)))
            try:
                self.llm.target.check_fits(length, turns * self.config.max_new_tokens)
            except ContextOverflow as error:
                raise ContextOverflow(f"prompt {prompt.id!r} of the suite: {error}") from error

    def _hf_model(self) -> PreTrainedModel:
        """The transformers model of the baselines: the target's own where it runs as it is, else a second one."""
        target = self.llm.target
        if target.tier == "reference":
            return target.model
        return load_model(self.config.model, dtype=target.model_dtype, device=target.device, **self.options)[0]

    def _warm_up(self, methods: Sequence[Method], temperatures: Sequence[float]) -> None:
        """One untimed call of each method at each temperature; what cannot run is refused here."""
        batch = max(self.batches, key=lambda batch: (len(batch), -sum(len(p.turns[0]) for p in batch)))  # shortest
        ids = [self._chat(prompt, ()) for prompt in batch]
        few = min(WARM_UP_TOKENS, self.config.max_new_tokens)
        for temperature in temperatures:
            params = replace(self.config.sampling(temperature), max_new_tokens=few)
            for method in methods:
                method.generate(ids, params, self.config.seed)

    def _measure_noise(self) -> None:
        if "noise" in self.journal.config or AR not in self.names or 0 not in self.config.each_temperature:
            return
        firsts = {batch[0].task: batch[0] for batch in reversed(self.batches)}
        prompts = [self._chat(prompt, ()) for prompt in list(firsts.values())[:NOISE_PROMPTS]]
        noise = {"paceline": measure_noise(self.llm.target, prompts)}
        if any(map(is_baseline, self.names)):
            noise["hf"] = max(noise["paceline"], measure_noise(self.llm.target, prompts, self.hf_model()))
        self.journal.note(noise=noise)

    # -- after -----------------------------------------------------------------------------------------------------
    def _differences(self) -> Iterator[Difference]:
        """Outputs that should be those of plain decoding, and are not."""
        if AR not in self.names:
            return
        for item in self._items():
            plain = self.journal.runs[item.key(AR)]
            for name in (name for name in self.names if self._is_compared(name, item.temperature)):
                outputs = self.journal.runs[item.key(name)].outputs
                allowed = self._allowed(name)
                for row, prompt in enumerate(item.prompts):
                    if outputs[row] != plain.outputs[row]:
                        ids = self._encode(item)[row]
                        found = diverge(self.llm.target, ids, plain.outputs[row], outputs[row], allowed)
                        yield Difference(
                            method=name,
                            task=prompt.task,
                            temperature=item.temperature,
                            id=prompt.id,
                            turn=item.turn,
                            allowed=allowed,
                            **found._asdict(),  # type: ignore[typeddict-item]  # its fields are keys
                        )

    def _is_compared(self, method: str, temperature: float) -> bool:
        """Whether plain decoding's ids are expected: of greedy outputs; and of samples where every token is drawn from
        the target's logits by its position, and their bits are the same at every width.
        """
        repeats = self.config.verifier == "match" and self.llm.target.exact and not is_baseline(method)
        return temperature == 0 or repeats

    def _allowed(self, method: str) -> float:
        """The gap between two logits that noise explains."""
        if self.llm.target.exact and not is_baseline(method):
            return 0.0
        return 2 * float(self.journal.config["noise"]["hf" if is_baseline(method) else "paceline"])

    def _is_sample(self, item: Item) -> bool:
        """Whether its trees are kept: a first turn of the first prompts of a task."""
        firsts = {batch[0].task: batch for batch in reversed(self.batches)}
        return item.turn == 0 and item.prompts is firsts[item.prompts[0].task]

    def _samples(self) -> Iterator[SampleAnswer]:
        for item in filter(self._is_sample, self._items()):
            for name in self.names:
                run = self.journal.runs[item.key(name)]
                if run.trees is not None:
                    yield sample(run, item.prompts[0].turns[0], self.llm.tokenizer)

    def _trace(self, runs: Sequence[Run]) -> None:
        texts = [
            TracedText(
                item.prompts[0].task,
                item.prompts[0].id,
                item.seed,
                self._encode(item)[0],
                self.journal.runs[item.key(AR)].outputs[0],
            )
            for item in self._items()
            if item.temperature == 0
        ]
        greedy = [run for run in runs if run.temperature == 0]
        path = self.journal.folder / TRACE
        write_trace(path, self.config, self.llm, texts, greedy, self.journal.config["machine"])


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    return hashlib.sha256(json.dumps([asdict(prompt) for prompt in prompts]).encode()).hexdigest()
