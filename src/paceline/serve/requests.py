"""From what clients send to requests of the engine."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paceline.api import LLM
from paceline.decoding.sampling import SamplingParams
from paceline.errors import ContextOverflow, OptionError, require
from paceline.policies import POLICIES
from paceline.serve.answers import TokenTexts
from paceline.serve.errors import TooLong
from paceline.serve.protocol import CompletionRequest, joined

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from paceline.decoding.request import Request
    from paceline.serve.protocol import ChatRequest, Common, Message, MethodChoice

PLAIN = "fixed:k=0"
LONG = 100_000  # characters or tokens of a text that takes a tokenizer long
AROUND = 50  # characters that a template writes around a message
MOST_DRAFTED = 32  # tokens a round that any request's policy may draft; more where a drafter's own one does


class FrontDesk:
    """Prompts as token ids, methods by their names. Tokenizers of its own: the engine's thread uses the model's. Long
    texts have another than short ones, which would wait for seconds.

    Raises:
        OptionError: the model has no tokenizer.
    """

    def __init__(self, llms: Mapping[str, LLM], context: int) -> None:
        self.llms, self.context = dict(llms), context
        self.default = next(iter(llms))
        self.most_drafted = max(MOST_DRAFTED, *(llm.new_policy().limit for llm in llms.values()))
        self.tokenizer, self._for_long = (copy.deepcopy(llms[self.default].tokenizer) for _ in range(2))
        self.token_texts = TokenTexts(self.tokenizer)
        self._locks = {id(tokenizer): threading.Lock() for tokenizer in (self.tokenizer, self._for_long)}

    @contextmanager
    def _tokenizer(self, characters: int = 0) -> Iterator[PreTrainedTokenizerBase]:
        chosen = self._for_long if characters > LONG else self.tokenizer
        with self._locks[id(chosen)]:
            yield chosen

    def encode(self, text: str, special: bool = True) -> list[int]:
        with self._tokenizer(len(text)) as tokenizer:
            return list(tokenizer.encode(text, add_special_tokens=special))

    def predicted(self, text: str) -> list[int]:
        """A prediction. Raises ContextOverflow for one that no answer here could follow to its end."""
        ids = self.encode(text, special=False)
        if len(ids) > self.context:
            raise ContextOverflow(f"prediction: its {len(ids)} tokens exceed the context of {self.context} tokens")
        return ids

    def decode(self, tokens: Sequence[int], field: str) -> str:
        """The text of what a request has in this field."""
        self._check_tokens(tokens, field)
        with self._tokenizer(len(tokens)) as tokenizer:
            return str(tokenizer.decode(list(tokens)))

    def chat(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """A conversation through the model's template."""
        template = str(self.tokenizer.chat_template or "")
        require(bool(template), "messages: this model has no chat template; use /v1/completions")
        require(not tools or "tools" in template, "tools: this model's chat template has no place for them")
        called = any(message.tool_calls for message in messages)
        require(not called or "tool_calls" in template, "tool_calls: this model's chat template has no place for them")
        plain = [message.plain() for message in messages]
        with self._tokenizer(self.size(messages, tools)) as tokenizer:
            try:
                ids = tokenizer.apply_chat_template(
                    plain,
                    tools=list(tools) or None,
                    add_generation_prompt=True,
                    return_dict=False,
                )
            except Exception as error:  # a template may refuse anything, in its own words
                raise OptionError(f"messages: the chat template refuses them: {error}") from error
        return list(ids)

    @staticmethod
    def size(messages: Sequence[Message], tools: Sequence[Any] = ()) -> int:
        """About how many characters the template makes of them: it writes something around each."""
        said = sum(AROUND + len(joined(message.content)) + len(str(message.tool_calls)) for message in messages)
        return said + len(str(tools))

    def conversation(self, body: ChatRequest) -> list[int]:
        hidden: Any = {"function": {"strict"}}  # of no account to the template
        tools = [tool.model_dump(exclude_none=True, exclude=hidden) for tool in body.tools] if body.uses_tools else []
        return self.chat(body.messages, tools)

    def check_format(self, body: ChatRequest) -> None:
        """Whether the answer can be what it must be; what that takes is then ready for the engine's thread."""
        if body.must_match:
            try:
                self.llms[self.default].matcher(SamplingParams(**body.must_match))
            except OptionError as error:
                field = "tools" if "grammar" in body.must_match else "response_format"
                raise OptionError(f"{field}: {error}") from error

    def requests(
        self, body: Common, prompts: Sequence[list[int]], prediction: Sequence[int] = ()
    ) -> Callable[[], list[Request]]:
        """What the engine's thread makes the requests with: `n` for each prompt.

        Raises:
            OptionError, ContextOverflow: what is asked for cannot be.
        """
        name, llm = self._method(body.paceline)
        self._check_tokens(body.logit_bias or (), "logit_bias")
        for prompt in prompts:
            self._check_tokens(prompt, "prompt")
        limits = [self._limit(len(prompt), body) for prompt in prompts]
        least = min(limits)
        require(body.min_tokens <= least, f"min_tokens: {body.min_tokens} are more than there is room for, {least}")

        def make() -> list[Request]:
            made: list[Request] = []
            for prompt, limit in zip(prompts, limits, strict=True):
                sampling = body.sampling() | {"max_new_tokens": limit}
                made += llm.requests([prompt] * body.n, prediction=prediction, drafter=name, **sampling)
                if isinstance(body, CompletionRequest):
                    for request in made[-body.n :]:
                        assert request.text
                        request.text.continues(prompt)
            longest = max((request.policy.limit for request in made), default=0)
            require(
                longest <= self.most_drafted,
                f"paceline.policy: drafts up to {longest} tokens a round; here {self.most_drafted} at most",
            )
            return made

        return make

    def _check_tokens(self, tokens: Collection[int], field: str) -> None:
        vocab, highest = self.llms[self.default].target.vocab_size, max(tokens, default=0)
        require(highest < vocab, f"{field}: token id {highest} is outside the vocabulary of {vocab}")

    def _limit(self, prompt: int, body: Common) -> int:
        room, wanted = self.context - prompt, body.new_tokens
        if room < (wanted or 1):
            new = "" if wanted is None else f" + {wanted} new tokens"
            most = f"this model's maximum context length is {self.context} tokens"  # clients look for these words
            raise TooLong(f"{most}, and a prompt of {prompt} tokens{new} exceeds it", body.length_field(room > 0))
        return wanted or room

    def _method(self, asked: MethodChoice) -> tuple[str, LLM]:
        name = asked.drafter or self.default
        require(name in self.llms, f"paceline.drafter: '{name}' is not offered here; {', '.join(self.llms)} are")
        llm = self.llms[name]
        policy, verifier = llm.policy, asked.verifier or llm.verifier
        if asked.policy:
            try:
                policy = POLICIES.parse(asked.policy)
            except OptionError as error:
                raise OptionError(f"paceline.policy: {error}") from error
            policy.check_remote("paceline.policy: ")
        if not asked.speculate:
            policy = POLICIES.parse(PLAIN)
        changed = (policy, verifier) != (llm.policy, llm.verifier)
        return name, LLM(llm.target, llm.drafter, policy, verifier) if changed else llm
