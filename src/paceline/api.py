"""What users call: `load` a model with a drafter and a policy, `generate`, `stream`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from os import PathLike
from typing import TYPE_CHECKING, Any, cast

import torch

from paceline.decoding.engine import Engine
from paceline.decoding.grammar import GrammarState, json_grammar, lark_grammar, new_matcher
from paceline.decoding.request import Request, check_verifier
from paceline.decoding.sampling import SamplingParams, token_ids
from paceline.decoding.text import TextStream
from paceline.drafters import DRAFTERS
from paceline.drafters.dispatch import Dispatch
from paceline.drafters.sharing import shared
from paceline.drafting.base import Drafter
from paceline.drafting.shared_texts import REQUEST
from paceline.errors import OptionError, check_text, first_line, require
from paceline.files import at_home
from paceline.policies import POLICIES
from paceline.policies.base import StoppingPolicy
from paceline.profiling.rounds import ready
from paceline.profiling.tuned import tuned_for
from paceline.registry import Spec, split_method
from paceline.targets import AUTO, Target, load_target, make_target

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paceline.decoding.logprobs import Logprob
    from paceline.decoding.stats import Stats
    from paceline.profiling.tuned import Tuned

#: Options of `load` that say where a model comes from and how its weights are held: see `sources.load_model`.
SOURCE = frozenset(
    ("revision", "trust_remote_code", "progress", "device_map", "quantization_config", "attn_implementation", "adapter")
) | {"merge_adapter"}

Prompt = str | Sequence[int] | Sequence[dict[str, str]]


@dataclass(frozen=True)
class Output:
    """What one prompt gave.

    Attributes:
        text: the continuation, special tokens left out, cut before a stop string.
        tokens: its ids, the end-of-sequence token included.
        finish_reason: "eos", "stop" or "length"; "cancelled" for a request that was given up.
        logprobs: of each token, when they were asked for.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    stats: Stats
    logprobs: list[Logprob] = field(default_factory=list)


class LLM:
    """A target with a drafter and a stopping policy. Make one with `paceline.load`. Threads may share it.

    Attributes:
        tuned: what `paceline tune` learned for this model, where the drafter starts from it.
    """

    def __init__(
        self, target: Target, drafter: Drafter, policy: Spec, verifier: str = "auto", tuned: Tuned | None = None
    ) -> None:
        self.target, self.drafter, self.policy, self.verifier, self.tuned = target, drafter, policy, verifier, tuned
        self.engine = Engine(target, drafter)
        if tuned:
            tuned.apply(target, drafter)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self.target.tokenizer is None:
            raise OptionError("this model was loaded without a tokenizer: give prompts as token ids")
        return self.target.tokenizer

    def method(self, drafter: str | Callable[[Target], Drafter], policy: str | None = None) -> LLM:
        """The same target with another drafter and policy; weights are shared."""
        with self.target.turns:
            return _assemble(self.target, drafter, policy, self.verifier, self.tuned)

    def generate(
        self,
        prompt: Prompt | list[Prompt],
        *,
        chat: bool | None = None,
        batch: int | None = None,
        prediction: str | Sequence[int] | None = None,
        **sampling: Any,
    ) -> Output | list[Output]:
        """Continue a prompt, or a list of them as one batch.

        Args:
            prompt: text, token ids, or chat messages (`[{"role": ..., "content": ...}]`); or a list of such.
            chat: put text through the tokenizer's chat template as a user message. Default: if it has one.
            batch: most prompts decoded at a time; default all.
            prediction: what the output will largely be, as for an edit of a text: drafted wherever it fits, before
                anything else. It changes the speed and nothing else.
            **sampling: fields of `SamplingParams`.

        Raises:
            OptionError: empty prompt, unknown or invalid sampling option.
            ContextOverflow: prompt and new tokens do not fit the context.
        """
        _refuse_method(sampling)
        several = _is_batch(prompt)
        prompts = cast("list[Prompt]", prompt if several else [prompt])
        requests = self.requests(prompts, chat=chat, prediction=prediction, **sampling)
        for _ in self.run(requests, batch):
            pass
        outputs = [self._output(request) for request in requests]
        return outputs if several else outputs[0]

    def run(self, requests: Sequence[Request], batch: int | None = None) -> Iterator[Request]:
        """Continue requests as `Engine.run` does, on an engine that drafts predictions and what grammars force, where
        there are any. While the other engine is busy, they join that: the drafter follows one at a time.
        """
        known = any(request.prediction or request.constraint for request in requests)
        with self.target.turns:
            engine, other = (self._predicting, self.engine) if known else (self.engine, self._predicting)
            running = (other if other.busy else engine).run(requests, batch)
            first = next(running, None)
        if first:
            yield first
            yield from running

    @cached_property
    def _predicting(self) -> Engine:
        return Engine(self.target, Dispatch(self.target, {self.drafter.source or "none": self.drafter}))

    def stream(self, prompt: Prompt, *, chat: bool | None = None, **sampling: Any) -> Iterator[str]:
        """Continue one prompt; yields text as it becomes certain, never half a character."""
        _refuse_method(sampling)
        require(not _is_batch(prompt), "stream continues one prompt: generate takes a list of them")
        [request] = self.requests([prompt], chat=chat, **sampling)
        for _ in self.run([request]):
            with self.target.turns:  # another thread may decode this request's next round
                text = "".join(piece.text for piece in request.read())
            if text:
                yield text

    def requests(
        self,
        prompts: Sequence[Prompt],
        *,
        chat: bool | None = None,
        prediction: str | Sequence[int] | None = None,
        drafter: str | None = None,
        **sampling: Any,
    ) -> list[Request]:
        """Prompts as `Request`s for `run` or an engine: what `generate` and `stream` are made of.

        Args:
            drafter: by what name the engine's `Dispatch` knows this one's drafter; other engines have only one.
        """
        unknown = set(sampling) - set(SamplingParams.__dataclass_fields__)
        require(not unknown, f"unknown sampling option: {', '.join(sorted(unknown))}")
        params = SamplingParams(**sampling)
        if isinstance(prediction, str):
            prediction = self.tokenizer.encode(prediction, add_special_tokens=False)
        prediction = token_ids("a prediction that is no text", () if prediction is None else prediction)
        seeds = (None if params.seed is None else params.seed + index for index in range(len(prompts)))
        return [
            self._request(prompt, replace(params, seed=seed), chat, drafter=drafter, prediction=prediction)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]

    def encode(self, prompt: Prompt, chat: bool | None = None) -> list[int]:
        """Token ids of a prompt; raises OptionError when it is empty, no text, or the chat template refuses it."""
        require(chat is None or isinstance(chat, bool), f"chat must be True, False or None, not {chat!r}")
        if isinstance(prompt, str):
            require(bool(check_text(prompt).strip()), "the prompt is empty")
            if not (bool(self.tokenizer.chat_template) if chat is None else chat):
                return cast("list[int]", self.tokenizer.encode(prompt))
            prompt = [{"role": "user", "content": prompt}]
        parts = _parts(prompt)
        if isinstance(parts[0], dict):
            require(bool(self.tokenizer.chat_template), "this model's tokenizer has no chat template")
            for message in parts:
                require(_is_message(message), f"a message has a role and a content, which {message!r} has not")
            try:
                ids = self.tokenizer.apply_chat_template(parts, add_generation_prompt=True, return_dict=False)
            except Exception as error:  # a template may refuse anything, in its own words
                raise OptionError(f"the chat template refuses these messages: {first_line(error)}") from error
            return cast("list[int]", ids)
        return token_ids("a prompt that is neither text nor chat messages", parts)

    def new_policy(self, *, plain: bool = True) -> StoppingPolicy:
        """A policy for one request, told where it runs: what a `Request` for `engine` is made with.

        Args:
            plain: whether the request is greedy, without processors of logits: other rounds have other costs.

        Raises:
            OptionError, CheckpointMismatch: it cannot run with this drafter or target.
        """
        return ready(cast("StoppingPolicy", self.policy.build()), self.drafter, plain=plain)

    def _request(self, prompt: Prompt, params: SamplingParams, chat: bool | None, **more: Any) -> Request:
        ids, vocab, tokenizer = self.encode(prompt, chat), self.target.vocab_size, self.target.tokenizer
        named = [*ids, *(params.logit_bias or ()), *(params.eos or ()), *more["prediction"]]
        self.target.check_ids(named)
        require((params.logprobs or 0) <= vocab, f"logprobs must be at most {vocab}, the size of the vocabulary")
        require(not params.stop or tokenizer is not None, "stop strings need a model with a tokenizer")
        eos = self._eos(params)
        constraint = None
        if params.constrained:
            constraint = GrammarState(self.matcher(params), vocab, eos, len(ids))
        processors, sampling = params.processors(len(ids), eos, self.target.device), params.temperature > 0
        return Request(
            ids,
            limit=params.max_new_tokens,
            policy=self.new_policy(plain=not (sampling or processors or constraint)),
            processors=processors,
            sampling=sampling,
            eos=eos,
            text=TextStream(tokenizer, params.stop, params.min_new_tokens) if tokenizer else None,
            seed=params.seed,
            verifier=self.verifier,
            logprobs=params.logprobs,
            constraint=constraint,
            **more,
        )

    def _eos(self, params: SamplingParams) -> Sequence[int]:
        return () if params.ignore_eos else self.target.eos if params.eos is None else params.eos

    def matcher(self, params: SamplingParams) -> LLMatcher:
        """A parser of what the output must match; raises OptionError when there can be none."""
        grammar = lark_grammar(params.grammar or "") if params.json_schema is None else json_grammar(params.json_schema)
        return new_matcher(grammar, self.tokenizer, self.target.vocab_size, self._eos(params))

    @staticmethod
    def _output(request: Request) -> Output:
        request.read()
        text = request.text.text if request.text else ""
        return Output(text, request.output, request.finish_reason or "", request.stats, request.logprobs)


def load(
    model: str | PathLike[str] | PreTrainedModel,
    *,
    drafter: str | Callable[[Target], Drafter] = "auto",
    policy: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    verifier: str = "auto",
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    tier: str = AUTO,
    exact: bool | None = None,
    share: str = REQUEST,
    fresh: bool = False,
    **source: Any,
) -> LLM:
    """Load a model to decode with a drafter and a stopping policy.

    Args:
        model: a named model ("smollm2-135m"), a hub id, a folder, a GGUF file, or a loaded Hugging Face model.
        drafter: `name[:option=value]...`, optionally with `+policy[:option=value]...`; or a function of the Target.
        policy: `name[:option=value]...`; default the drafter's own.
        tokenizer: of a model passed as an object.
        verifier: "auto", "match" or "rejection": see `Request`.
        dtype: as for `from_pretrained`; default float32 on a CPU, elsewhere the checkpoint's. A model passed as an
            object keeps its own.
        device: as for `from_pretrained`. A model passed as an object stays where it is.
        tier: how the target pass runs: one of `paceline.targets.TIERS`, or "auto". That is the fastest that runs a
            model loaded here, and "reference" for one passed as an object, whose weights other tiers would take over.
        exact: True insists on greedy output being plain decoding's bit for bit, which the torch and native tiers
            promise in float32 on the CPU, the native one in bfloat16 too; False takes torch's own attention in the
            torch tier. Default: what the tier promises.
        share: "process": the drafter remembers some of what earlier requests said; "request": each has its own memory.
        fresh: leave out what `paceline tune` learned for this model.
        **source: of models by name: `revision`, `trust_remote_code`; `device_map`, `quantization_config` and
            `attn_implementation` as for `from_pretrained`; `adapter`, folder or hub id of a PEFT adapter, and
            `merge_adapter`, False to keep it beside the weights.

    Raises:
        OptionError: unknown drafter, policy or option; `exact` where it cannot be; an option that would be ignored.
        ModelError: the model cannot be found, fetched or used.
    """
    drafter = shared(drafter, share)
    check_verifier(verifier)  # refuse what is wrong before a model is loaded
    require(exact is None or isinstance(exact, bool), f"exact must be True, False or None, not {exact!r}")
    if isinstance(drafter, str):
        parse_method(drafter, policy)
    unknown = sorted(set(source) - SOURCE)
    require(not unknown, f"load has no option {', '.join(unknown)}; there are {', '.join(sorted(SOURCE))}")
    if isinstance(model, str | PathLike):
        require(tokenizer is None, "tokenizer: only of a loaded model; one that is loaded by name brings its own")
        target = load_target(str(model), dtype=dtype, device=device, tier=tier, exact=exact, **source)
    else:
        require(callable(model) and hasattr(model, "config"), f"a model is its name or a loaded model, not {model!r}")
        check_tokenizer(tokenizer)
        require(not source, f"{', '.join(source)}: only of models that are loaded by name")
        _refuse_change(model, dtype, device)
        target = make_target(model, tokenizer, "reference" if tier == AUTO else tier, exact)
    return _assemble(target, drafter, policy, verifier, None if fresh else tuned_for(target))


def check_tokenizer(tokenizer: object) -> None:
    """Raises OptionError for what is neither a tokenizer nor None."""
    is_one = tokenizer is None or callable(getattr(tokenizer, "get_vocab", None))
    require(is_one, f"a tokenizer is one of transformers', not {tokenizer!r}")


def _refuse_change(model: PreTrainedModel, dtype: torch.dtype | str | None, device: str | torch.device) -> None:
    """Raises OptionError where a loaded model is asked for in another type or place than it has."""
    if dtype is not None:
        has = str(model.dtype).removeprefix("torch.")
        wanted = str(dtype).removeprefix("torch.")
        require(wanted == has, f"dtype {wanted}: a loaded model keeps its own, {has}; model.to(dtype=...) changes it")
    if str(device) != "cpu":  # the default, which says nothing
        here = model.device
        there = str(device) in (str(here), here.type)
        require(there, f"device {device}: a loaded model stays where it is, on {here}; model.to(device=...) moves it")


def _refuse_method(options: Mapping[str, object]) -> None:
    named = [name for name in ("drafter", "policy") if name in options]
    require(not named, f"a request has no {' or '.join(named)} of its own: llm.method(drafter, policy) has another")


def parse_method(drafter: str, policy: str | None = None) -> tuple[Spec, Spec]:
    """The drafter and policy that the strings name; raises OptionError when they are unknown or have bad options."""
    require(policy is None or isinstance(policy, str), f"a policy is its name, not {policy!r}")
    drafter, own = split_method(drafter, POLICIES.__contains__)
    require(own is None or policy is None, f"the policy is given twice, as {own} and as {policy}")
    policy = own if policy is None else policy
    chosen = DRAFTERS.parse(drafter)
    for option in getattr(chosen.cls, "files", ()):  # of another package's class, too
        named = chosen.options.get(option)
        there = named in (None, "auto", "none") or at_home(named).exists()
        require(there, f"{drafter.partition(':')[0]}: {option}: there is no {named}")
    spec = POLICIES.parse(chosen.cls.default_policy if policy is None else policy)
    spec.build()  # values are checked now, not at the first request
    return chosen, spec


def _assemble(
    target: Target,
    drafter: str | Callable[[Target], Drafter],
    policy: str | None,
    verifier: str,
    tuned: Tuned | None = None,
) -> LLM:
    if isinstance(drafter, str):
        chosen, rule = parse_method(drafter, policy)
        built = chosen.build(target)
    else:
        require(callable(drafter), f"a drafter is its name, or a function of the target, not {drafter!r}")
        built = drafter(target)
        require(isinstance(built, Drafter), f"a function of the target gives a drafter, not {built!r}")
        rule = POLICIES.parse(policy or built.default_policy)
    llm = LLM(target, built, rule, verifier, tuned)
    llm.new_policy()  # what cannot run together is refused now, not at the first request
    return llm


def _is_message(message: object) -> bool:
    """Calls of tools need no content."""
    said = isinstance(message, dict) and (message.get("content") is not None or bool(message.get("tool_calls")))
    return said and "role" in cast("dict[str, Any]", message)


def _is_batch(prompt: object) -> bool:
    """A list of prompts, as against one prompt that is itself a list (of ids or of chat messages)."""
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], Integral | dict)


def _parts(prompt: object) -> list[Any]:
    """The ids or messages that a prompt is made of; raises OptionError where there are none."""
    try:
        parts = None if isinstance(prompt, dict | bytes) else list(cast("Iterable[Any]", prompt))
    except TypeError:
        parts = None
    if parts is None:
        raise OptionError(f"a prompt is text, token ids or chat messages, not {type(prompt).__name__}")
    require(bool(parts), "the prompt is empty")
    return parts


__all__ = ["LLM", "Output", "Prompt", "StoppingPolicy", "load"]
