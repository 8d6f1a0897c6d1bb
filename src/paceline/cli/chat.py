"""`paceline chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from typer import Exit, Option

from paceline.cli.console import summary, write
from paceline.cli.options import MethodOptions, ModelOptions, Sampling, grouped
from paceline.errors import ContextOverflow, PacelineError, check_text, require

if TYPE_CHECKING:
    from paceline.api import LLM
    from paceline.decoding.request import Request
    from paceline.decoding.stats import Stats

COMMANDS = "/reset forgets the conversation, /stats tells what it cost, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


@grouped
def chat(
    source: ModelOptions,
    method: MethodOptions,
    sampling: Sampling,
    system: Annotated[str | None, Option("--system", help="System message of the conversation.")] = None,
    colour: Annotated[bool, Option("--colour", help="Colour the tokens by who proposed them.")] = False,
) -> None:
    """Talk with the model; it remembers the conversation."""
    params = sampling.checked()
    llm = source.llm(method)
    require(bool(llm.tokenizer.chat_template), f"{source.model} has no chat template: it is not a chat model")
    conversation = ChatSession(llm, params, check_text(system, "system message") if system else None)
    _say(f"{source.model}, {method.label(llm)}. {COMMANDS}.")
    failed = False
    while (line := _ask()) is not None:
        if line == "/exit":
            break
        elif line == "/reset":
            conversation.reset()
            _say("a new conversation")
        elif line == "/stats":
            _say(conversation.cost())
        elif line.startswith("/"):
            _say(COMMANDS)
        elif line:
            failed |= not _answer(conversation, line, colour)
    if failed and not sys.stdin.isatty():  # nobody was there to see it
        raise Exit(1)


@dataclass
class ChatSession:
    """What was said, and what it cost."""

    llm: LLM
    params: dict[str, Any]
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)

    def __post_init__(self) -> None:
        from paceline.decoding.prefixes import PrefixStore

        self.llm.engine.prefixes = PrefixStore(self.llm.target.context)  # earlier turns are not read again
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, text: str) -> Request:
        """The request that answers `text`; `keep` its answer."""
        ids = self.llm.encode([*self.messages, {"role": "user", "content": check_text(text)}])
        room = self.llm.target.context - len(ids)
        if room < 1:
            what = "conversation" if any(one["role"] == "user" for one in self.messages) else "message"
            raise ContextOverflow(
                f"the {what} of {len(ids)} tokens fills the model's context of {self.llm.target.context} tokens"
                + (": /reset forgets it" if what == "conversation" else "")
            )
        limit = min(self.params["max_new_tokens"], room)
        return self.llm.requests([ids], **self.params | {"max_new_tokens": limit})[0]

    def keep(self, question: str, answer: str, stats: Stats) -> None:
        self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        self.stats.append(stats)

    def cost(self) -> str:
        finished = [stats for stats in self.stats if stats.seconds > 0]  # stopped answers have no end to measure to
        if not finished:
            return "nothing has been said yet"
        tokens, seconds = sum(stats.tokens for stats in finished), sum(stats.seconds for stats in finished)
        return f"last answer: {summary(self.stats[-1])}\nin all: {tokens} tokens, {tokens / seconds:.1f} tokens/s"


def _answer(conversation: ChatSession, question: str, colour: bool) -> bool:
    """Whether there was nothing wrong."""
    try:
        request = conversation.ask(question)
    except PacelineError as error:  # this turn cannot be; the conversation goes on
        _say(f"error: {error}")
        return False
    right = True
    try:
        write(conversation.llm, request, colour)
    except KeyboardInterrupt:
        _say("\n(stopped)")
    except PacelineError as error:  # such as a grammar that cannot be followed any more
        _say(f"\nerror: {error}")
        right = False
    request.read()  # what of it is not on the screen
    answer = request.text.text if request.text else ""
    if answer:
        conversation.keep(question, answer, request.stats)
    return right


def _ask() -> str | None:
    """The next line, or None at the end of the input."""
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() its history and editing keys)
    while True:
        try:
            return input("\n> " if interactive else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            _say("\n(Ctrl-D leaves)")
        except UnicodeDecodeError:
            _say("error: that line is not UTF-8")


def _say(text: str) -> None:
    """To the side: answers alone go to standard output."""
    print(text, file=sys.stderr, flush=True)
