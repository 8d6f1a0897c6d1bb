from __future__ import annotations

import builtins
import io
import sys

import pytest

from paceline.decoding.engine import Engine
from paceline.decoding.prefixes import PrefixStore
from paceline.errors import OptionError
from tiny import byte_tokenizer, small_llama


@pytest.fixture
def talk(run, tiny_model_dir, monkeypatch: pytest.MonkeyPatch):
    """`talk("a line", ..., "--option", ...)`: a conversation whose lines come from a pipe."""

    def talk(*lines: str, options: tuple = (), model=tiny_model_dir):
        data = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        return run("chat", "-m", model, "-n", 12, *options)

    return talk


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch, tiny_tokenizer) -> list[str]:
    """The prompt of each request, as text."""
    seen: list[str] = []
    original = Engine.run

    def run(self, requests, batch=None):
        seen.extend(tiny_tokenizer.decode(request.ids) for request in requests)
        return original(self, requests, batch)

    monkeypatch.setattr(Engine, "run", run)
    return seen


def test_it_remembers_the_conversation_until_reset(talk, prompts):
    code, out, _ = talk("first", "", "second", "/reset", "third", "/exit", "never read")
    assert code == 0
    assert len(prompts) == 3
    assert prompts[0] == "user: first\nassistant: "
    answer = prompts[1].removeprefix("user: first\nassistant: ").partition("\nuser: second\nassistant: ")[0]
    assert answer
    assert answer in out
    assert prompts[2] == "user: third\nassistant: "


def test_system_message_survives_reset(talk, prompts):
    talk("a", "/reset", "b", options=("--system", "be kind"))
    assert prompts == [f"system: be kind\nuser: {text}\nassistant: " for text in "ab"]


def test_end_of_input_leaves(talk):
    assert talk().code == 0


def test_statistics_and_help(talk):
    code, out, err = talk("/stats", "/what", "hello", "/stats")
    assert code == 0
    assert "nothing has been said yet" in err
    assert err.count("/reset forgets") == 2  # at the start, and for an unknown command
    assert "last answer: 12 tokens" in err
    assert "in all: 12 tokens" in err
    assert "tokens/s" not in out


def test_a_turn_that_cannot_be_does_not_end_the_conversation(talk, prompts):
    code, _, err = talk("x" * 300, "short", "x" * 300)
    assert code == 1
    assert "error: the message of 318 tokens fills the model's context of 256 tokens\n" in err
    assert "tokens fills the model's context of 256 tokens: /reset forgets it" in err
    assert prompts == ["user: short\nassistant: "]


def test_answers_shrink_to_what_the_context_leaves(talk, prompts):
    code, _, err = talk("x" * 230, "/stats")
    assert code == 0
    assert len(prompts) == 1
    assert "last answer: 8 tokens" in err


def test_interrupt_stops_the_answer_only(talk, prompts, monkeypatch: pytest.MonkeyPatch):
    run = Engine.run

    def interrupted(self, requests, batch=None):
        for rounds, request in enumerate(run(self, requests, batch)):
            if rounds == 3 and len(prompts) == 1:
                raise KeyboardInterrupt
            yield request

    monkeypatch.setattr(Engine, "run", interrupted)
    code, _, err = talk("first", "second")
    assert code == 0
    assert "(stopped)" in err
    assert prompts[1].startswith("user: first\nassistant: ")  # what it had said counts as said
    assert prompts[1].endswith("\nuser: second\nassistant: ")


def test_an_error_stops_the_answer_only(talk, prompts, monkeypatch: pytest.MonkeyPatch):
    run = Engine.run

    def failing(self, requests, batch=None):
        for rounds, request in enumerate(run(self, requests, batch)):
            yield request
            if rounds == 3 and len(prompts) == 1:
                raise OptionError("the grammar cannot be followed")

    monkeypatch.setattr(Engine, "run", failing)
    code, _, err = talk("first", "second")
    assert code == 1  # nobody sat there to see it
    assert "\nerror: the grammar cannot be followed\n" in err
    assert len(prompts) == 2


def test_interrupt_at_the_prompt_does_not_leave(run, tiny_model_dir, monkeypatch: pytest.MonkeyPatch):
    events = iter([KeyboardInterrupt, EOFError])

    def nobody_types(prompt=""):
        raise next(events)

    monkeypatch.setattr(builtins, "input", nobody_types)
    code, _, err = run("chat", "-m", tiny_model_dir)
    assert code == 0
    assert "(Ctrl-D leaves)" in err


def test_a_line_that_is_not_utf8(talk):
    code, _, err = talk("bad \udcff byte")
    assert code == 0
    assert "error: that line is not UTF-8" in err


def test_a_model_without_chat_template_is_refused(talk, tmp_path):
    small_llama().float().save_pretrained(tmp_path)
    byte_tokenizer(chat=False).save_pretrained(tmp_path)
    code, out, err = talk("hello", model=tmp_path)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "no chat template" in err


def test_earlier_turns_are_not_read_again(talk, monkeypatch: pytest.MonkeyPatch):
    reused = []
    original = PrefixStore.restore
    monkeypatch.setattr(
        PrefixStore, "restore", lambda self, *arguments: reused.append(original(self, *arguments)) or reused[-1]
    )
    assert talk("the first question", "another").code == 0
    assert reused[0].tokens == 0
    assert reused[1].tokens > len("user: the first question")
