"""What is compared: paceline's drafters and policies, plain decoding, and transformers' own generation modes.

A method's name is what the user typed: `ar` (paceline's runtime without drafting), a baseline of `BASELINES` with its
options, or `drafter[:options]+policy[:options]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

from paceline.bench.latency import Arrivals, Latency
from paceline.decoding.stats import PHASES
from paceline.drafters import DRAFTERS
from paceline.errors import OptionError
from paceline.policies import POLICIES
from paceline.registry import Registry, split_method

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from paceline.api import LLM
    from paceline.decoding.request import Request
    from paceline.decoding.sampling import SamplingParams

AR = "ar"
HF = "hf"

#: Generation by other runtimes on the same weights: classes made of (name, transformers model, LLM).
BASELINES = Registry(
    "method",
    "paceline.baselines",
    {
        HF: "paceline.bench.baselines:Generate",
        "hf-lookup": "paceline.bench.baselines:Lookup",
        "hf-early-exit": "paceline.bench.baselines:HFEarlyExit",
        "hf-assisted": "paceline.bench.baselines:Assisted",
    },
)


class DraftedTree(NamedTuple):
    """A round's tree: its nodes' token ids, parents and sources (see `TokenTree`), and the accepted nodes."""

    tokens: list[int]
    parents: list[int]
    sources: list[str]
    path: list[int]


@dataclass
class Generated:
    """What one timed call gave.

    Attributes:
        outputs: new token ids of each prompt, the end-of-sequence token included.
        seconds: wall time, from token ids to token ids.
        passes: target passes, summed over the prompts; None when unknown.
        rounds: of each prompt, `(drafted, depth, accepted, emitted)` a round: see `decoding.stats.Round`.
        split: seconds by phase; what is in no round (prefill, joining and leaving) is in "other".
        latencies: of each prompt; None when unknown.
        timings: of each prompt, seconds by phase (`PHASES`) of each round.
        trees: of each prompt, what was drafted in each round.
        texts: of each prompt, the answer of a server, which tells no ids: then `outputs` are empty.
        tokens: of each prompt, output tokens as such a server counts them.
        drafts: rounds that drafted, tokens drafted and tokens accepted, by its counters; None where it has none.
    """

    outputs: list[list[int]]
    seconds: float
    passes: int | None = None
    rounds: list[list[tuple[int, int, int, int]]] | None = None
    split: dict[str, float] | None = None
    latencies: Sequence[Latency] | None = None
    timings: list[list[list[float]]] | None = None
    trees: list[list[DraftedTree]] | None = None
    texts: list[str] | None = None
    tokens: list[int] | None = None
    drafts: Sequence[int] | None = None

    @property
    def lengths(self) -> list[int]:
        """Tokens of each output."""
        return [len(output) for output in self.outputs] if self.tokens is None else self.tokens

    @property
    def drafted_and_accepted(self) -> tuple[int, int] | None:
        """Tokens; None where they are not known."""
        if self.drafts is not None:
            return self.drafts[1], self.drafts[2]
        if self.rounds is None:
            return None
        rounds = [round_ for prompt in self.rounds for round_ in prompt]
        return sum(r[0] for r in rounds), sum(r[2] for r in rounds)


class Method(ABC):
    """Something that continues prompts. `paceline` tells whether it runs in paceline's own runtime."""

    paceline = False

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def generate(self, prompts: Sequence[list[int]], params: SamplingParams, seed: int) -> Generated:
        """Continue the prompts as one batch, prompt i with the random numbers of `seed + i`."""


class Paceline(Method):
    """A drafter and a policy in paceline's runtime."""

    paceline = True

    def __init__(self, name: str, llm: LLM) -> None:
        super().__init__(name)
        self.llm = llm

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams, seed: int) -> Generated:
        arrivals = Arrivals()
        requests = self.llm.requests(prompts, **{**asdict(params), "seed": seed})
        for request in requests:
            request.text = None  # token ids are what is measured: transformers' generate writes no text either
        trees: dict[int, list[DraftedTree]] = {id(request): [] for request in requests}
        for request in self.llm.engine.run(requests):
            arrivals.note(id(request), len(request.stats.sources))
            if request.last:
                tree, path = request.last
                trees[id(request)].append(DraftedTree(tree.tokens, tree.parents, tree.sources, path))
        seconds = arrivals.seconds
        return Generated(
            [request.output for request in requests],
            seconds,
            passes=sum(len(request.stats.rounds) for request in requests),
            rounds=[[(r.drafted, r.depth, r.accepted, r.emitted) for r in x.stats.rounds] for x in requests],
            split=_split(requests, seconds),
            latencies=[arrivals.latency(id(request), len(request.stats.sources)) for request in requests],
            timings=[[[round(r.seconds[phase], 7) for phase in PHASES] for r in x.stats.rounds] for x in requests],
            trees=list(trees.values()),
        )


def check_method(name: str) -> None:
    """Raises OptionError for a name, option or value that no model could make valid."""
    if is_baseline(name):
        BASELINES.parse(name)
    elif name != AR:
        drafter, policy = split_method(name, POLICIES.__contains__)
        if drafter.partition(":")[0] not in DRAFTERS:
            known = ", ".join([AR, *BASELINES, *DRAFTERS])
            raise OptionError(f"unknown method '{name}'; there are {known} (drafters take '+policy')")
        POLICIES.parse(policy or DRAFTERS.parse(drafter).cls.default_policy).build()
        DRAFTERS.parse(drafter)


def is_baseline(name: str) -> bool:
    return name.partition(":")[0] in BASELINES


def build_method(name: str, llm: LLM, hf_model: Callable[[], PreTrainedModel]) -> Method:
    """The method called `name` on the weights of `llm`.

    Args:
        hf_model: gives the transformers model for baselines; not called for other methods.

    Raises:
        PacelineError: when it cannot run on this model.
    """
    if is_baseline(name):
        return cast("Method", BASELINES.parse(name).build(name, hf_model(), llm))
    return Paceline(name, llm.method("none" if name == AR else name))


def _split(requests: Sequence[Request], seconds: float) -> dict[str, float]:
    # The rows of a batch share one clock a round: counted once.
    clocks = {id(r.seconds): r.seconds for request in requests for r in request.stats.rounds}.values()
    split = {phase: sum(clock[phase] for clock in clocks) for phase in PHASES}
    split["other"] += seconds - sum(split.values())
    return split
