"""Sampling parameters, and transformers' logits processors applied at every node of a tree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from paceline.decoding.penalties import LogitBias, OutputPenalty
from paceline.errors import require

#: Processors that look at scores alone run once over all nodes; every other one gets each node's own history.
HISTORY_FREE = (
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.LogitNormalization,
    hf.InfNanRemoveLogitsProcessor,
    hf.SuppressTokensLogitsProcessor,
    LogitBias,
)

#: Processors with state of their own, or a second model run, advance by one token a call: no tree can honour them.
REFUSED = (hf.UnbatchedClassifierFreeGuidanceLogitsProcessor, hf.SynthIDTextWatermarkLogitsProcessor)


@dataclass(frozen=True)
class SamplingParams:
    """How to generate. Names and meanings are those of transformers' GenerationConfig, or of the OpenAI API.

    Args:
        temperature: 0 is greedy decoding.
        presence_penalty: taken off the logit of every token of the output.
        frequency_penalty: the same, for each time it stands there.
        logit_bias: added to the logits of these token ids.
        eos: token ids that end the output; None takes the model's.
        ignore_eos: nothing ends the output but its length and `stop`.
        logprobs: record each output token's log-probability, and so many of the likeliest beside it.
        stop: string or strings that end the output; the text ends before it, the tokens with the one that completes it.
        seed: of a request's random numbers; None draws one. In a batch, request i gets seed + i.

    Raises:
        OptionError: for a value out of range.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    eos: tuple[int, ...] | None = None
    stop: str | Sequence[str] = ()
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        require(self.max_new_tokens >= 1, f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            f"min_new_tokens must lie in 0 .. max_new_tokens, not {self.min_new_tokens}",
        )
        require(self.temperature >= 0, f"temperature must be >= 0, not {self.temperature}")
        require(self.top_k >= 0, f"top_k must be >= 0, not {self.top_k}")
        require(0 < self.top_p <= 1, f"top_p must lie in (0, 1], not {self.top_p}")
        require(0 <= self.min_p <= 1, f"min_p must lie in [0, 1], not {self.min_p}")
        require(self.repetition_penalty > 0, f"repetition_penalty must be > 0, not {self.repetition_penalty}")
        require(
            self.no_repeat_ngram_size >= 0,
            f"no_repeat_ngram_size must be >= 0, not {self.no_repeat_ngram_size}",
        )
        numbers = (self.presence_penalty, self.frequency_penalty, *(self.logit_bias or {}).values())
        require(all(map(math.isfinite, numbers)), "penalties and logit_bias must be finite numbers")
        require(self.logprobs is None or self.logprobs >= 0, f"logprobs must be >= 0, not {self.logprobs}")
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        require(all(self.stop), "a stop string must not be empty")

    def processors(self, prompt_length: int, eos: Sequence[int], device: torch.device) -> LogitsProcessorList:
        """In the order in which transformers' `generate` applies them; what it does not have comes first."""
        chosen = LogitsProcessorList()
        if self.logit_bias:
            chosen.append(LogitBias(self.logit_bias, device))
        if self.presence_penalty or self.frequency_penalty:
            chosen.append(OutputPenalty(prompt_length, self.presence_penalty, self.frequency_penalty))
        if self.repetition_penalty != 1:
            chosen.append(hf.RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.no_repeat_ngram_size:
            chosen.append(hf.NoRepeatNGramLogitsProcessor(self.no_repeat_ngram_size))
        if self.min_new_tokens and eos:
            chosen.append(
                hf.MinNewTokensLengthLogitsProcessor(prompt_length, self.min_new_tokens, list(eos), device=str(device))
            )
        if self.temperature not in (0, 1):
            chosen.append(hf.TemperatureLogitsWarper(self.temperature))
        if self.temperature and self.top_k:
            chosen.append(hf.TopKLogitsWarper(self.top_k))
        if self.temperature and self.top_p < 1:
            chosen.append(hf.TopPLogitsWarper(self.top_p))
        if self.temperature and self.min_p:
            chosen.append(hf.MinPLogitsWarper(self.min_p))
        return chosen


class NodeProcessors:
    """A LogitsProcessorList that scores the nodes of a tree, each with its own history.

    Raises:
        OptionError: for a processor that cannot work on trees.
    """

    def __init__(self, processors: LogitsProcessorList) -> None:
        for processor in processors:
            require(
                not isinstance(processor, REFUSED),
                f"{type(processor).__name__} keeps state from token to token and cannot be used with drafting",
            )
        self.processors = processors

    def __bool__(self) -> bool:
        return bool(self.processors)

    def __call__(
        self, logits: Float[Tensor, "nodes vocab"], history: list[int], paths: Sequence[list[int]]
    ) -> Float[Tensor, "nodes vocab"]:
        """Scores of nodes whose histories are `history + paths[node]`."""
        scores = logits.float()
        for processor in self.processors:
            if isinstance(processor, HISTORY_FREE):
                scores = processor(None, scores)  # type: ignore[arg-type]  # it does not look
            else:
                scores = self._by_history(processor, scores, history, paths)
        return scores

    @staticmethod
    def _by_history(
        processor: hf.LogitsProcessor, scores: Tensor, history: list[int], paths: Sequence[list[int]]
    ) -> Tensor:
        scores = scores.clone()
        for length in {len(path) for path in paths}:  # nodes of one depth have histories of one length
            nodes = [node for node, path in enumerate(paths) if len(path) == length]
            ids = torch.tensor([history + paths[node] for node in nodes], device=scores.device)
            scores[nodes] = processor(ids, scores[nodes])
        return scores


class Noise:
    """A request's random numbers: independent streams for drafting and for verification, and one draw for each
    output position, so that sample-match gives what plain decoding with the same seed gives.
    """

    def __init__(self, seed: int | None) -> None:
        if seed is None:
            seed = int(torch.randint(2**31, ()))
        self.seed = seed
        self._generators = [torch.Generator().manual_seed(seed * 3 + stream) for stream in range(3)]
        self._positions: list[float] = []

    def draft(self) -> float:
        return self._uniform(0, 1)[0]

    def verify(self) -> float:
        return self._uniform(1, 1)[0]

    def positions(self, start: int, count: int) -> list[float]:
        """The draws of output positions `start .. start + count - 1`."""
        while len(self._positions) < start + count:
            self._positions += self._uniform(2, 256)
        return self._positions[start : start + count]

    def _uniform(self, stream: int, count: int) -> list[float]:
        return torch.rand(count, dtype=torch.float64, generator=self._generators[stream]).tolist()
