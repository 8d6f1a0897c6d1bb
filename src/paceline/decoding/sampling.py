"""Sampling parameters, and transformers' logits processors applied at every node of a tree."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.errors import OptionError, require

INTEGERS = ("max_new_tokens", "min_new_tokens", "top_k", "no_repeat_ngram_size", "seed", "logprobs")
REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
#: What scores in float32 can bear: of factors, and of what is added.
LARGE, HUGE = 1e6, 1e20

# transformers' processors, and what goes with them, are imported where a request has any: they take a second.

#: A logits processor as transformers has them: of ids `[rows, length]` and scores `[rows, vocab]`.
Processor = Callable[[Any, Tensor], Any]

#: Refuses tokens: of scores `[nodes, vocab]`, a history and the nodes' paths after it.
Mask = Callable[[Tensor, list[int], Sequence[list[int]]], Tensor]


@dataclass(frozen=True)
class SamplingParams:
    """How to generate. Names and meanings are those of transformers' GenerationConfig, or of the OpenAI API.

    Args:
        min_new_tokens: before which neither an end-of-sequence token nor a stop string ends the output.
        temperature: 0 is greedy decoding.
        presence_penalty: taken off the logit of every token of the output.
        frequency_penalty: the same, for each time it stands there.
        logit_bias: added to the logits of these token ids.
        eos: token ids that end the output; None takes the model's.
        ignore_eos: nothing ends the output but its length and `stop`.
        logprobs: record each output token's log-probability, and so many of the likeliest beside it.
        stop: string or strings that end the output; the text ends before it, the tokens with the one that completes it.
        seed: of a request's random numbers; None draws one. In a batch, request i gets seed + i.
        json_schema: the output is JSON that fits this schema, written as `json.dumps` does, keys in the schema's order.
        grammar: the output matches this grammar, a Lark text as llguidance reads it. A token is chosen among those that
            the grammar allows, by the target's distribution over them. Either ends the output when it is complete.

    Raises:
        OptionError: for a value out of range, or options that do not go together.
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
    json_schema: Mapping[str, Any] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        for name, kept in self._checked().items():
            object.__setattr__(self, name, kept)
        require(self.max_new_tokens >= 1, f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            f"min_new_tokens must lie in 0 .. max_new_tokens, not {self.min_new_tokens}",
        )
        require(0 <= self.temperature <= LARGE, f"temperature must lie in 0 .. {LARGE:g}, not {self.temperature}")
        require(self.top_k >= 0, f"top_k must be >= 0, not {self.top_k}")
        require(0 < self.top_p <= 1, f"top_p must lie in (0, 1], not {self.top_p}")
        require(0 <= self.min_p <= 1, f"min_p must lie in [0, 1], not {self.min_p}")
        require(
            1 / LARGE <= self.repetition_penalty <= LARGE,
            f"repetition_penalty must lie in {1 / LARGE:g} .. {LARGE:g}, not {self.repetition_penalty}",
        )
        require(
            self.no_repeat_ngram_size >= 0,
            f"no_repeat_ngram_size must be >= 0, not {self.no_repeat_ngram_size}",
        )
        numbers = (self.presence_penalty, self.frequency_penalty, *(self.logit_bias or {}).values())
        require(
            all(abs(number) <= HUGE for number in numbers),
            f"penalties and logit_bias must be finite numbers, {HUGE:g} at most",
        )
        require(self.logprobs is None or self.logprobs >= 0, f"logprobs must be >= 0, not {self.logprobs}")
        require(abs(self.seed or 0) < 2**61, f"seed must lie between -2**61 and 2**61, not {self.seed}")
        require(all(self.stop), "a stop string must not be empty")
        require(self.grammar is None or isinstance(self.grammar, str), "grammar must be a text")
        require(self.json_schema is None or self.grammar is None, "json_schema and grammar exclude each other")
        if self.constrained:
            others = ("min_new_tokens", "ignore_eos", "no_repeat_ngram_size")  # might leave no token at all
            wrong = [name for name in others if getattr(self, name)]
            require(not wrong, f"{', '.join(wrong)}: not with a grammar or a JSON schema, which says where it ends")

    def _checked(self) -> dict[str, Any]:
        """The options, as what they are kept as. Raises OptionError for one of another kind."""
        made: dict[str, Any] = {}
        for name in INTEGERS:
            made[name] = whole_number(name, getattr(self, name), none=name in ("seed", "logprobs"))
        for name in REALS:
            made[name] = _real_number(name, getattr(self, name))
        require(isinstance(self.ignore_eos, bool), f"ignore_eos must be True or False, not {self.ignore_eos!r}")
        stop = () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else self.stop
        texts = isinstance(stop, Sequence) and all(isinstance(text, str) for text in stop)
        require(texts, f"stop must be a text or some texts, not {self.stop!r}")
        made["stop"] = tuple(stop)
        if self.eos is not None:
            made["eos"] = tuple(token_ids("eos", (self.eos,) if isinstance(self.eos, Integral) else self.eos))
        require(
            self.logit_bias is None or isinstance(self.logit_bias, Mapping),
            f"logit_bias must name numbers by token ids, not {self.logit_bias!r}",
        )
        if self.logit_bias:
            biases = zip(token_ids("logit_bias", self.logit_bias), self.logit_bias.values(), strict=True)
            made["logit_bias"] = {token: _real_number("a logit_bias", bias) for token, bias in biases}
        require(self.json_schema is None or isinstance(self.json_schema, Mapping), "json_schema must be an object")
        return made

    @property
    def constrained(self) -> bool:
        """Whether the output must match something."""
        return self.json_schema is not None or self.grammar is not None

    def processors(self, prompt_length: int, eos: Sequence[int], device: torch.device) -> Sequence[Processor]:
        """In the order in which transformers' `generate` applies them; what it does not have comes first."""
        changes = self.logit_bias or self.presence_penalty or self.frequency_penalty or self.no_repeat_ngram_size
        if not (self.temperature or changes or self.repetition_penalty != 1 or self.min_new_tokens):
            return []
        from paceline.decoding.processors import make_processors

        return make_processors(self, prompt_length, eos, device)


def whole_number(name: str, value: Any, none: bool = False) -> int | None:
    """An option's value as an int; None where that may be. Raises OptionError for anything else."""
    if value is None and none:
        return None
    number = isinstance(value, Integral) and not isinstance(value, bool)
    require(number, f"{name} must be a whole number, not {value!r}")
    return int(value)


def _real_number(name: str, value: Any) -> float:
    """An option's value as a float. Raises OptionError for what is no number, or too large for a float."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    require(number, f"{name} must be a number, not {value!r}")
    try:
        return float(value)
    except OverflowError as error:
        raise OptionError(f"{name} is too large a number") from error


def token_ids(name: str, given: Any) -> list[int]:
    """As a list of ints. Raises OptionError for what is none."""
    try:
        require(not isinstance(given, str | bytes), f"{name} must be token ids, not {given!r}")
        tokens = list(given)
        require(not any(isinstance(token, bool) for token in tokens), f"{name} must be token ids, not True or False")
        return [operator.index(token) for token in tokens]
    except TypeError as error:
        shown = repr(given)
        kind = shown if len(shown) < 60 else type(given).__name__
        raise OptionError(f"{name} must be token ids, not {kind}") from error


class NodeProcessors:
    """Logits processors that score the nodes of a tree, each with its own history.

    Args:
        mask: comes before all of them.

    Attributes:
        temperature: what logits are divided by, where nothing else is done to them; else None.

    Raises:
        OptionError: for a processor that cannot work on trees.
    """

    def __init__(self, processors: Sequence[Processor], mask: Mask | None = None) -> None:
        self.processors, self._mask = processors, mask
        self._history_free: tuple[type, ...] = ()
        self.temperature: float | None = None if mask else 1.0
        if not processors:
            return
        from paceline.decoding.processors import HISTORY_FREE, REFUSED, temperature_of

        self._history_free = HISTORY_FREE
        self.temperature = None if mask else temperature_of(processors)
        for processor in processors:
            require(
                not isinstance(processor, REFUSED),
                f"{type(processor).__name__} keeps state from token to token and cannot be used with drafting",
            )

    def __bool__(self) -> bool:
        return bool(self.processors) or self._mask is not None

    def __call__(
        self, logits: Float[Tensor, "nodes vocab"], history: list[int], paths: Sequence[list[int]]
    ) -> Float[Tensor, "nodes vocab"]:
        """Scores of nodes whose histories are `history + paths[node]`."""
        scores = logits.float()
        if self._mask:
            scores = self._mask(scores, history, paths)
        for processor in self.processors:
            if type(processor) in self._history_free:  # one that is derived from it may look at more
                scores = processor(None, scores)  # it does not look
            else:
                scores = self._by_history(processor, scores, history, paths)
        return scores

    @staticmethod
    def _by_history(processor: Processor, scores: Tensor, history: list[int], paths: Sequence[list[int]]) -> Tensor:
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
