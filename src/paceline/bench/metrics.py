"""The field's metrics over the finished calls (EESD's eq. 11, 12 and 14; KOALA's n-alpha)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, TypedDict

import numpy as np
from jaxtyping import Float

from paceline.bench.intervals import ratio_interval
from paceline.bench.latency import Latency
from paceline.bench.methods import AR, HF
from paceline.bench.suites import OVERALL
from paceline.decoding.stats import PHASES

if TYPE_CHECKING:
    from paceline.bench.exactness import Difference
    from paceline.bench.journal import Run

POSITIONS = 5  # of n_alpha


class ResultRow(TypedDict):
    """A line of `results.jsonl`; a value that does not apply or is not known is null."""

    method: str
    task: str  # "overall": all tasks pooled
    temperature: float
    batch: int
    prompts: int  # continuations: each turn of a conversation is one
    tokens: int  # output tokens, counted from ids, or by a server
    seconds: float  # wall time of the calls, prefill included
    tokens_per_s: float
    speedup_ar: float | None  # seconds a token of `ar` / of this method, over the same prompts
    speedup_ar_95: tuple[float, float] | None  # where it lies, with 95 %: see `ratio_interval`
    speedup_hf: float | None  # the same against transformers' `generate`
    ttft_s: float | None  # mean seconds from a call to the first tokens of a prompt
    tpot_ms: float | None  # milliseconds a token after these, by a prompt's own clock
    decode_speedup_ar: float | None  # that of `ar` / that of this method: without the prompt, which no draft changes
    tau: float | None  # tokens a target pass
    acceptance_length: float | None  # SPEED-Bench's: see `acceptance_length`
    v_d: float | None  # accepted / drafted tokens
    r_d: float | None  # accepted / output tokens
    hm: float | None  # harmonic mean of the two, in %
    n_alpha: list[float | None] | None  # chains: P(n-th drafted token accepted | those before it were), n = 1..5
    identical: int | None  # greedy: outputs with the ids of `ar`,
    tie: int | None  # that differ where two tokens tie,
    wrong: int | None  # and that differ elsewhere
    split: dict[str, float] | None  # seconds: draft, verify, sample, and other (prefill too); their sum is `seconds`
    predicted_speedup: float | None  # EESD eq. 14: see `predicted_speedup`


@dataclass
class Totals:
    """Sums over calls of one method."""

    prompts: int = 0
    tokens: int = 0
    seconds: float = 0.0
    passes: int | None = 0
    split: dict[str, float] | None = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    rounds: list[Sequence[int]] | None = field(default_factory=list)
    latencies: list[Latency] | None = field(default_factory=list)
    counts: tuple[int, int] | None = (0, 0)  # tokens drafted and accepted

    @classmethod
    def of(cls, runs: Iterable[Run]) -> Totals:
        sums = cls()
        for run in runs:
            sums.prompts += len(run.outputs)
            sums.tokens += sum(run.lengths)
            sums.seconds += run.seconds
            sums.passes = None if sums.passes is None or run.passes is None else sums.passes + run.passes
            if sums.split is None or run.split is None or sums.rounds is None or run.rounds is None:
                sums.split = sums.rounds = None
            else:
                sums.split = {phase: sums.split[phase] + run.split[phase] for phase in PHASES}
                sums.rounds += [round_ for request in run.rounds for round_ in request]
            counts = run.drafted_and_accepted
            if sums.counts is not None:
                sums.counts = counts and (sums.counts[0] + counts[0], sums.counts[1] + counts[1])
            known = sums.latencies is not None and run.latencies is not None
            read = (Latency(*latency) for latency in run.latencies or ())  # plain lists, of a run that was read
            sums.latencies = [*(sums.latencies or ()), *read] if known else None
        return sums

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens

    @property
    def first_tokens(self) -> float | None:
        """Mean seconds to them."""
        return fmean(latency.first for latency in self.latencies) if self.latencies else None

    @property
    def decode_seconds(self) -> float | None:
        """Seconds a token, of those after the first ones."""
        tokens = sum(latency.tokens for latency in self.latencies or ())
        return sum(latency.decode for latency in self.latencies or ()) / tokens if tokens else None

    @property
    def drafted(self) -> int:
        return self.counts[0] if self.counts else 0

    @property
    def accepted(self) -> int:
        return self.counts[1] if self.counts else 0


def results(
    runs: Sequence[Run],
    differences: Sequence[Difference],
    methods: Sequence[str],
    batch: int,
    compared: Callable[[str, float], bool] = lambda method, temperature: temperature == 0,
) -> list[ResultRow]:
    """One row per temperature, method and task, all tasks ("overall") first.

    Args:
        compared: whether plain decoding's outputs are expected of a method at a temperature.
    """
    rows = []
    for temperature in dict.fromkeys(run.temperature for run in runs):
        here = [run for run in runs if run.temperature == temperature]
        verdicts = Counter(
            (d["method"], d["task"], d["verdict"]) for d in differences if d["temperature"] == temperature
        )
        for method in methods:
            for task in (OVERALL, *dict.fromkeys(run.task for run in here)):
                chosen = {
                    name: Totals.of(r for r in here if r.method == name and task in (OVERALL, r.task))
                    for name in {method, AR, HF} & set(methods)
                }
                row = _row(method, task, temperature, batch, chosen)
                row["acceptance_length"] = acceptance_length(
                    run for run in here if run.method == method and task in (OVERALL, run.task)
                )
                if AR in methods and method != AR:
                    row["speedup_ar_95"] = ratio_interval(_pairs(here, method, task))
                if AR in methods and compared(method, temperature):
                    tie, wrong = (
                        sum(
                            n for (m, t, v), n in verdicts.items() if m == method and task in (OVERALL, t) and v == kind
                        )
                        for kind in ("tie", "wrong")
                    )
                    row["identical"], row["tie"], row["wrong"] = row["prompts"] - tie - wrong, tie, wrong
                rows.append(row)
    return rows


def _pairs(runs: Sequence[Run], method: str, task: str) -> Float[np.ndarray, "prompts 4"]:
    """Seconds and tokens of plain decoding and of the method, over the turns of each conversation or batch."""
    found: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for run in runs:
        if run.method in (AR, method) and task in (OVERALL, run.task):
            sums = found.setdefault(tuple(run.ids), {}).setdefault(run.method, [0.0, 0.0])
            sums[0] += run.seconds
            sums[1] += sum(run.lengths)
    return np.array([[*by_method[AR], *by_method[method]] for by_method in found.values()])


def _row(method: str, task: str, temperature: float, batch: int, totals: dict[str, Totals]) -> ResultRow:
    own, ar = totals[method], totals.get(AR)
    v_d = own.accepted / own.drafted if own.drafted else None
    r_d = own.accepted / own.tokens if own.counts is not None else None
    return ResultRow(
        method=method,
        task=task,
        temperature=temperature,
        batch=batch,
        prompts=own.prompts,
        tokens=own.tokens,
        seconds=own.seconds,
        tokens_per_s=own.tokens / own.seconds,
        speedup_ar=ar.seconds_per_token / own.seconds_per_token if ar else None,
        speedup_ar_95=None,
        speedup_hf=totals[HF].seconds_per_token / own.seconds_per_token if HF in totals else None,
        ttft_s=own.first_tokens,
        tpot_ms=1000 * own.decode_seconds if own.decode_seconds else None,
        decode_speedup_ar=ar.decode_seconds / own.decode_seconds
        if ar and ar.decode_seconds and own.decode_seconds
        else None,
        tau=own.tokens / own.passes if own.passes else None,
        acceptance_length=None,
        v_d=v_d,
        r_d=r_d,
        hm=None if v_d is None or r_d is None else harmonic_mean(v_d, r_d),
        n_alpha=n_alpha(own.rounds or ()),
        identical=None,
        tie=None,
        wrong=None,
        split=own.split,
        predicted_speedup=predicted_speedup(own, ar) if ar else None,
    )


def acceptance_length(runs: Iterable[Run]) -> float | None:
    """Tokens a target pass of each prompt, the turns of a conversation in one, and of these the mean: prompts weigh the
    same whatever their outputs' lengths, which they do not in tau (as SPEED-Bench's own programs count, specdec_bench).

    Returns:
        None where the passes of a prompt are not known: of other decoders' batches.
    """
    tokens, passes = Counter[str](), Counter[str]()
    for run in runs:
        if run.rounds is None and (run.passes is None or len(run.ids) > 1):
            return None
        counts = [run.passes or 0] if run.rounds is None else map(len, run.rounds)
        for prompt, length, count in zip(run.ids, run.lengths, counts, strict=True):
            tokens[prompt] += length
            passes[prompt] += count
    return fmean(tokens[prompt] / passes[prompt] for prompt in tokens) if tokens and all(passes.values()) else None


def harmonic_mean(v_d: float, r_d: float) -> float:
    """In %."""
    return 200 * v_d * r_d / (v_d + r_d) if v_d + r_d else 0.0


def n_alpha(rounds: Iterable[Sequence[int]]) -> list[float | None] | None:
    """Conditional acceptance of the n-th drafted token, n = 1..5; None unless all drafts were chains."""
    rounds = list(rounds)
    if any(drafted != depth for drafted, depth, *_ in rounds):
        return None
    found = accepted_by_depth(rounds, POSITIONS)
    return [accepted / trials if trials else None for accepted, trials in found] if found[0][1] else None


def accepted_by_depth(rounds: Iterable[Sequence[int]], depths: int) -> list[tuple[int, int]]:
    """At each depth, from 1: how many drafted tokens were accepted, of how many trials.

    The n-th token of a round is a trial when it was drafted, those before it were accepted, and the output did not
    end before it (then `emitted == accepted`: the target's own token is missing, and nobody knows how it went on).
    """
    trials, successes = [0] * depths, [0] * depths
    for _, depth, accepted, emitted in rounds:
        for n in range(min(depth, accepted + (emitted > accepted), depths)):
            trials[n] += 1
            successes[n] += n < accepted
    return list(zip(successes, trials, strict=True))


def predicted_speedup(own: Totals, ar: Totals) -> float | None:
    """EESD eq. 14, `v_d / ((alpha - v_d) r_d + v_d)` = `1 / (alpha r_d / v_d + 1 - r_d)`, alpha = T_draft / T_target.

    T_draft is the method's drafting time per drafted token; T_target is the verification time per pass of `ar`, that is
    of a pass over one token: the formula takes a wider pass to cost the same, and leaves out everything else. In a
    batch both are per row. `r_d / v_d` is drafted / output tokens, so that the value exists with nothing accepted.
    """
    if not own.drafted or own.split is None or ar.split is None or not ar.passes or not ar.split["verify"]:
        return None
    alpha = (own.split["draft"] / own.drafted) / (ar.split["verify"] / ar.passes)
    return 1 / (alpha * own.drafted / own.tokens + 1 - own.accepted / own.tokens)
