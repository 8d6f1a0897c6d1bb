"""Several threads, or streams that take turns, share one target."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

import paceline
from paceline import LLM
from paceline.decoding.engine import Engine
from paceline.decoding.request import Request
from paceline.policies.fixed import Fixed
from paceline.targets.turns import Turns
from tiny import byte_tokenizer, small_llama

PROMPTS = ["Tell me of rain", "One two one two one", "x", "def add(a, b):"]


@pytest.fixture(scope="module", params=["torch", "native", "reference"])
def llm(request: pytest.FixtureRequest) -> LLM:
    model = small_llama()
    made = model.float() if request.param == "native" else model  # double: no near ties where sums are not exact
    return paceline.load(made, tokenizer=byte_tokenizer(), tier=request.param, drafter="prompt-lookup")


def written(llm: LLM, prompt: str, how: int) -> str:
    """A greedy answer, asked for in one of several ways."""
    if how % 3 == 0:
        return "".join(llm.stream(prompt, max_new_tokens=40, eos=()))
    guess = "one two" if how % 3 == 1 else ()
    output = llm.generate(prompt, max_new_tokens=40, eos=(), prediction=guess)
    assert not isinstance(output, list)
    assert len(output.tokens) == 40
    return output.text


class TestThreads:
    def test_each_gets_what_it_gets_alone(self, llm: LLM) -> None:
        other = llm.method("trigram")
        jobs = [((llm, other)[at % 2], PROMPTS[at % 4], at) for at in range(24)]
        alone = [written(*job) for job in jobs]
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(lambda job: written(*job), jobs)) == alone

    def test_of_one_engine(self, llm: LLM) -> None:
        engine = Engine(llm.target, llm.drafter, rows=2, slots=80)

        def decode(prompt: str) -> list[int]:
            request = Request(llm.encode(prompt), limit=30, policy=Fixed(k=3))
            for _ in engine.run([request]):
                pass
            return request.output

        alone = [decode(prompt) for prompt in PROMPTS]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(decode, PROMPTS)) == alone
        assert engine.idle

    def test_a_request_given_up_in_one_harms_no_other(self, llm: LLM) -> None:
        whole = written(llm, PROMPTS[0], 0)

        def give_up(_: int) -> None:
            stream = llm.stream(PROMPTS[1], max_new_tokens=200, eos=())
            next(stream)
            stream.close()

        with ThreadPoolExecutor(4) as pool:
            given_up = pool.map(give_up, range(8))
            assert "".join(llm.stream(PROMPTS[0], max_new_tokens=40, eos=())) == whole
            assert len(list(given_up)) == 8


class TestStreamsByTurns:
    def test_none_loses_text(self, llm: LLM) -> None:
        """The second one's rounds end the first one, which has not told all of its text by then."""
        alone = [written(llm, prompt, 0) for prompt in PROMPTS]
        streams = [llm.stream(prompt, max_new_tokens=40, eos=()) for prompt in PROMPTS]
        pieces: list[list[str]] = [[] for _ in streams]
        for _ in range(41):
            for told, stream in zip(pieces, streams, strict=True):
                told.append(next(stream, ""))
        assert ["".join(told) for told in pieces] == alone

    @pytest.mark.parametrize("first", [0, 1])
    def test_with_and_without_a_prediction(self, llm: LLM, first: int) -> None:
        """Two engines with one drafter, which can follow one of them."""
        alone = [written(llm, prompt, 0) for prompt in PROMPTS[:2]]
        predictions = [(), "one two"] if first else ["one two", ()]
        requests = [
            llm.requests([prompt], prediction=prediction, max_new_tokens=40, eos=())[0]
            for prompt, prediction in zip(PROMPTS[:2], predictions, strict=True)
        ]
        runs = [llm.run([request]) for request in requests]
        for run in runs:
            next(run)
        for run in runs:
            for _ in run:
                pass
        for request, text in zip(requests, alone, strict=True):
            request.read()
            assert request.text
            assert request.text.text == text

    @pytest.mark.parametrize("first", ["one two", ()])
    def test_one_that_rests_between_batches_is_joined(self, llm: LLM, first: object) -> None:
        """It will need the drafter again, although it decodes nothing now."""
        alone = [written(llm, prompt, 0) for prompt in PROMPTS[:3]]
        several = llm.requests(PROMPTS[:2], prediction=first, max_new_tokens=40, eos=())
        [other] = llm.requests([PROMPTS[2]], prediction=() if first else "one two", max_new_tokens=40, eos=())
        run = llm.run(several, batch=1)
        while not several[0].finish_reason:
            next(run)
        joined = llm.run([other])
        next(joined)
        for one in (run, joined):
            list(one)
        assert [llm._output(request).text for request in (*several, other)] == alone


class TestTurns:
    @staticmethod
    def start(work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    def test_who_waits_comes_before_who_had_it(self) -> None:
        turns, order, waiting = Turns(), list[str](), threading.Event()

        def other() -> None:
            waiting.set()
            with turns:
                order.append("other")

        with turns:
            thread = self.start(other)
            waiting.wait()
            while turns._next.acquire(blocking=False):  # until the other one stands in line
                turns._next.release()
        with turns:
            order.append("first again")
        thread.join()
        assert order == ["other", "first again"]

    def test_enters_again(self) -> None:
        turns = Turns()
        entered = list[bool]()
        with turns:
            with turns:
                pass
            thread = self.start(lambda: entered.append(turns.__enter__() is None))
            thread.join(0.05)
            assert not entered
        thread.join()
        assert entered

    def test_an_error_gives_it_back(self) -> None:
        turns = Turns()
        with pytest.raises(ZeroDivisionError), turns:
            raise ZeroDivisionError
        thread = self.start(lambda: turns.__enter__())
        thread.join(5)
        assert not thread.is_alive()
