"""What clients may send: the OpenAI API's requests as far as they are honoured. Any other field is refused."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cached_property
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, PlainValidator, model_validator

from paceline.decoding.sampling import LARGE
from paceline.files import read_json
from paceline.serve.tools import calls_grammar

MOST_STOPS, LONGEST_STOP, MOST_CHOICES, MOST_LOGPROBS, MOST_BIAS = 16, 1000, 128, 20, 100
MOST_FIELDS = 100  # of an object: more are one fault, as each that is found takes time (so do lists: `fail_fast`)
SEEDS = 2**32  # that requests can have; clients may send whole numbers of 64 bits

Choice = Literal["none", "auto", "required"]  # of whether tools are called
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


class Strict(BaseModel):
    """Refuses what it does not know, and one type for another; null stands for what is left out, as clients send it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MOST_FIELDS:
            raise ValueError(f"it has {len(data)} fields, of which {MOST_FIELDS} are possible")
        return {key: value for key, value in data.items() if value is not None}


class Body(Strict):
    """All of a request."""

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, data: Any) -> Any:
        """JSON can name halves of surrogate pairs, which no tokenizer and no response can hold. A body of another type,
        as curl's -d sends it, comes as it is.
        """
        if isinstance(data, bytes):
            raise ValueError("the body must be JSON, sent with the header content-type: application/json")
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a text has one half of a surrogate pair") from None
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        return data


def _stops(given: Any) -> list[str]:
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a text or a list of texts")
    if len(stops) > MOST_STOPS:
        raise ValueError(f"at most {MOST_STOPS} are possible, not {len(stops)}")
    if not all(stops):
        raise ValueError("a text of it is empty")
    if any(len(stop) > LONGEST_STOP for stop in stops):
        raise ValueError(f"a text of it may have {LONGEST_STOP} characters at most")
    return stops


def _number(given: Any) -> Any:
    if isinstance(given, bool):
        raise ValueError("must be a number here, not true or false")
    return given


def _biases(given: Any) -> dict[int, float]:
    """By token id. Ends at the first fault, of which there may be many."""
    if not isinstance(given, dict):
        raise ValueError("must be an object of numbers by token ids")
    for token, bias in given.items():
        if not str(token).isdecimal():
            raise ValueError(f"'{token}' is no token id")
        if type(bias) not in (int, float) or not -MOST_BIAS <= bias <= MOST_BIAS:
            raise ValueError(f"the number of token {token} must lie in -{MOST_BIAS} .. {MOST_BIAS}")
    return {int(token): float(bias) for token, bias in given.items()}


def _prompts(given: Any) -> list[str | list[int]]:
    """One or more, each a text or token ids."""
    prompts = [given] if isinstance(given, str) or _are_ids(given) else given
    texts = isinstance(prompts, list) and all(isinstance(prompt, str) for prompt in prompts)
    if not isinstance(prompts, list) or not (texts or all(map(_are_ids, prompts))):
        raise ValueError("must be a text, token ids, or a list of texts or of token ids")
    return prompts


def _are_ids(given: Any) -> bool:
    return isinstance(given, list) and all(type(token) is int and token >= 0 for token in given)


def _content(given: Any) -> Any:
    if not isinstance(given, str | list) or given == []:
        raise ValueError("must be a text or a list of parts")
    return given


def _tool_choice(given: Any) -> Any:
    if isinstance(given, str) and given not in get_args(Choice):
        form = '{"type": "function", "function": {"name": …}}'
        raise ValueError(f"must be {', '.join(get_args(Choice))} or {form}, not '{given}'")
    return given


class MethodChoice(Strict):
    """How this request is sped up; what it says changes no token of greedy output."""

    drafter: str | None = None
    policy: str | None = None
    verifier: Literal["auto", "match", "rejection"] | None = None
    speculate: bool = True
    trace: bool = False


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class TextPart(Strict):
    type: Literal["text"]
    text: str


class PredictedContent(Strict):
    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        return joined(self.content)


class NamedSchema(Strict):
    name: str = ""
    description: str | None = None
    body: Annotated[dict[str, Any], Field(alias="schema")] = {}
    strict: bool = True  # it always is


class TextFormat(Strict):
    type: Literal["text"]


class JsonFormat(Strict):
    type: Literal["json_object"]


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | Annotated[list[TextPart], Field(fail_fast=True)], BeforeValidator(_content)] = ""
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] = []  # of an answer that is sent back

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if "content" not in self.model_fields_set and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing")
        return self

    def plain(self) -> dict[str, Any]:
        """As chat templates read it: with the arguments of calls as objects, which clients send as JSON text."""
        kept = self.model_dump(exclude_none=True, exclude={"annotations"})
        role = "system" if self.role == "developer" else self.role
        for call in kept.get("tool_calls", ()):
            function = call.get("function")
            if isinstance(function, dict) and isinstance(text := function.get("arguments"), str):
                with suppress(ValueError):
                    arguments = read_json(text)
                    function["arguments"] = arguments if isinstance(arguments, dict) else text
        return kept | {"role": role, "content": joined(self.content)}


class Function(Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class Common(Body):
    """What both kinds of completion take."""

    model: str = ""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0  # -1 as in vLLM: off
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[FiniteFloat, Field(ge=1 / LARGE, le=LARGE)] = 1.0
    presence_penalty: Annotated[FiniteFloat, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[FiniteFloat, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[dict[int, float], PlainValidator(_biases, dict[int, float])] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] = []
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    # Whose request it is, and what for: of no account here.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] = {}
    paceline: MethodChoice = MethodChoice()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.stream and "stream_options" in self.model_fields_set:
            raise ValueError("stream_options: needs stream: true")
        if self.new_tokens is not None and self.min_tokens > self.new_tokens:
            raise ValueError(f"min_tokens: {self.min_tokens} are more than the answer may have, {self.new_tokens}")
        return self

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens

    def length_field(self, of_answer: bool) -> str:
        """The name of what says how long the answer may be, or else of the prompt."""
        return "max_tokens" if of_answer else "prompt"

    @property
    def top(self) -> int | None:
        """How many likeliest tokens are wanted beside each; None: no log-probabilities."""
        raise NotImplementedError

    def sampling(self) -> dict[str, Any]:
        """Fields of `SamplingParams`, the number of tokens aside."""
        return {
            "min_new_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_k": max(self.top_k, 0),
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias,
            "stop": self.stop,
            "seed": None if self.seed is None else self.seed % SEEDS,
            "ignore_eos": self.ignore_eos,
            "logprobs": self.top,
        }


class ChatRequest(Common):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] = 0
    tools: Annotated[list[Tool], Field(fail_fast=True)] = []
    tool_choice: Annotated[Choice | NamedTool, BeforeValidator(_tool_choice)] = "auto"
    parallel_tool_calls: bool = True
    response_format: Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")] = TextFormat(
        type="text"
    )
    prediction: PredictedContent | None = None
    # These say what is done anyway.
    store: Literal[False] = False
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] = ["text"]
    service_tier: Literal["auto", "default"] = "auto"

    @model_validator(mode="after")
    def _logprobs_are_asked_for(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs: true")
        return self

    @model_validator(mode="after")
    def _formats_can_be_kept(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools]
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice: there are no tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice: there is no tool '{self.tool_choice.function.name}'")
        if names and self.tool_choice == "auto" and any(tool.function.strict for tool in self.tools):
            raise ValueError("tools: strict calls need a tool_choice, required or a name")
        if names and self.tool_choice != "none" and self.response_format.type != "text":
            raise ValueError("response_format: cannot be combined with tools, unless tool_choice is none")
        if self.must_match and (self.min_tokens or self.ignore_eos):
            field = "min_tokens" if self.min_tokens else "ignore_eos"
            raise ValueError(f"{field}: response_format and tool_choice say where the answer ends")
        return self

    @property
    def uses_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @cached_property
    def must_match(self) -> dict[str, Any]:
        """Fields of `SamplingParams` that say what the answer must look like."""
        wanted = self.response_format
        if isinstance(wanted, JsonFormat):
            return {"json_schema": {"type": "object"}}
        if isinstance(wanted, SchemaFormat):
            return {"json_schema": wanted.json_schema.body}
        if not self.tools or self.tool_choice in ("none", "auto"):
            return {}
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        functions = [tool.function for tool in self.tools if named in (None, tool.function.name)]
        schemas = {function.name: function.parameters or {"type": "object"} for function in functions}
        return {"grammar": calls_grammar(schemas, several=self.parallel_tool_calls and named is None)}

    def sampling(self) -> dict[str, Any]:
        return super().sampling() | self.must_match

    @property
    def new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def length_field(self, of_answer: bool) -> str:
        asked = "max_completion_tokens" if self.max_completion_tokens else "max_tokens"
        return asked if of_answer else "messages"

    @property
    def top(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class CompletionRequest(Common):
    prompt: Annotated[list[str | Tokens], PlainValidator(_prompts, str | Tokens | list[str] | list[Tokens])]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS), BeforeValidator(_number)] | None = None
    echo: bool = False
    best_of: int | None = None

    @model_validator(mode="after")
    def _all_are_told(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise ValueError("best_of: all choices are told, as many as n: none is chosen here")
        return self

    @model_validator(mode="after")
    def _prompts_have_no_logprobs(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo: cannot be combined with logprobs, since those of the prompt are not computed")
        return self

    @property
    def top(self) -> int | None:
        return self.logprobs


class TokenizeRequest(Body):
    model: str = ""
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Body):
    model: str = ""
    tokens: Tokens


def joined(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
