"""What requests may ask for besides sampling: log-probabilities, biases, predictions, known prefixes."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import paceline
from decoding.test_steps import loaded
from paceline import LLM
from paceline.decoding import batch, reading
from paceline.decoding.engine import Engine
from paceline.decoding.penalties import LogitBias, OutputPenalty
from paceline.decoding.prefixes import PrefixStore
from paceline.decoding.request import Request
from paceline.drafters.dispatch import Dispatch
from paceline.drafters.prediction import Alignment, Progress
from paceline.errors import OptionError
from paceline.policies.fixed import Fixed
from paceline.targets.cache import KVCache
from paceline.targets.linear import can_pack
from paceline.targets.span import Span
from tiny import byte_tokenizer, small_llama

exact = pytest.mark.skipif(not can_pack(), reason="no oneDNN: nothing is exact")
PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]


@cache
def looked_up() -> LLM:
    return paceline.load(
        small_llama().float(), tier="torch", tokenizer=byte_tokenizer(), drafter="prompt-lookup", policy="fixed:k=4"
    )


@exact
class TestLogprobs:
    @pytest.mark.parametrize("drafter", ["prompt-lookup", "early-exit", "medusa", "eagle"])
    @pytest.mark.parametrize("temperature", [0.0, 0.9])
    def test_they_are_those_of_plain_decoding(self, drafter: str, temperature: float) -> None:
        llm = loaded(drafter)
        asked = {"max_new_tokens": 16, "temperature": temperature, "seed": 1, "logprobs": 3, "eos": ()}
        verifier, llm.verifier = llm.verifier, "match"
        got, want = llm.generate(PROMPT, **asked), loaded("none").generate(PROMPT, **asked)
        llm.verifier = verifier
        assert got.tokens == want.tokens
        assert got.logprobs == want.logprobs
        assert len(got.logprobs) == 16

    def test_they_are_log_probabilities(self) -> None:
        out = loaded("none").generate(PROMPT, max_new_tokens=4, logprobs=257, temperature=2.0, seed=0)
        for token, known in zip(out.tokens, out.logprobs, strict=True):
            assert dict(known.top)[token] == known.logprob
            assert sum(torch.tensor([p for _, p in known.top]).exp()) == pytest.approx(1, abs=1e-5)
            assert [p for _, p in known.top] == sorted((p for _, p in known.top), reverse=True)

    def test_more_than_there_are(self) -> None:
        with pytest.raises(OptionError, match="257"):
            loaded("none").generate(PROMPT, logprobs=258)


class TestProcessors:
    def test_a_bias_is_added(self) -> None:
        scores = torch.zeros(2, 5)
        got = LogitBias({1: 2.0, 4: -3.0}, scores.device)(None, scores)
        assert got.tolist() == [[0, 2, 0, 0, -3]] * 2
        assert not scores.any()

    def test_penalties_count_the_output_alone(self) -> None:
        ids = torch.tensor([[0, 1, 2, 2]])
        got = OutputPenalty(2, presence=1.0, frequency=0.5)(ids, torch.zeros(1, 4))
        assert got.tolist() == [[0, 0, -2, 0]]

    @pytest.mark.parametrize("option", ["temperature", "repetition_penalty"])
    def test_whole_numbers_do(self, option: str) -> None:
        whole, real = ({option: value, "seed": 1, "temperature": 2.0} | {option: value} for value in (2, 2.0))
        assert looked_up().generate(PROMPT, **whole).tokens == looked_up().generate(PROMPT, **real).tokens

    @pytest.mark.parametrize(
        "wrong", [{"presence_penalty": float("nan")}, {"logprobs": -1}, {"logit_bias": {300: 1.0}}]
    )
    def test_what_is_refused(self, wrong: dict[str, object]) -> None:
        with pytest.raises(OptionError):
            looked_up().generate(PROMPT, **wrong)  # type: ignore[arg-type]


class TestPredictions:
    def test_the_place_is_found_again(self) -> None:
        alignment = Alignment([1, 2, 3, 4, 5, 6, 7, 8])
        for token in (1, 2):
            alignment.append(token)
        assert alignment.next(2) == [3, 4]
        alignment.append(99)  # an edit
        assert alignment.next(2) == []
        alignment.append(4)
        assert alignment.next(9) == [5, 6, 7, 8]
        for token in (5, 6, 7, 8, 9):
            alignment.append(token)
        assert alignment.next(3) == []
        assert alignment.followed == 7

    def test_one_token_far_away_says_little(self) -> None:
        alignment = Alignment([*range(40)])
        alignment.append(30)
        assert alignment.at is None
        alignment.append(31)
        assert alignment.next(1) == [32]

    def test_a_request_that_goes_on_while_it_is_looked_at(self) -> None:
        """A server tells how far it is while the engine's thread decodes."""

        class Growing(list[int]):
            def __getitem__(self, at: Any) -> Any:
                told = super().__getitem__(at)
                self.append(len(self))
                return told

        progress, ids = Progress(Alignment([*range(9)]), seen=0), Growing([0])
        assert [progress.follow(ids).followed for _ in range(4)] == [1, 2, 3, 4]

    @exact
    def test_output_is_the_same_in_fewer_rounds(self) -> None:
        llm = loaded("none").method("none", "fixed:k=6")
        plain = llm.generate([100], max_new_tokens=40, eos=())
        edited = [*plain.tokens[:15], 3, *plain.tokens[17:]]
        got = llm.generate([100], max_new_tokens=40, eos=(), prediction=edited)
        assert got.tokens == plain.tokens
        assert len(got.stats.rounds) < 20 < len(plain.stats.rounds)
        assert got.stats.sources.count("prediction") > 20
        assert llm.generate([100], max_new_tokens=8, eos=(), prediction="xyz").tokens == plain.tokens[:8]

    @exact
    def test_the_policy_is_asked_about_its_drafter_and_told_of_it(self) -> None:
        """Once a round, but for those in which a prediction is drafted, to its end."""
        llm, plain = looked_up(), loaded("none").generate(PROMPT, max_new_tokens=40, eos=())
        edited = [*plain.tokens[:12], 3, 3, 3, *plain.tokens[12:24], 200, 201]
        [request] = llm.requests([PROMPT], max_new_tokens=40, eos=(), prediction=edited)
        policy = request.policy = Watched(k=4)
        [*_] = llm.run([request])
        assert request.output == plain.tokens
        assert request.stats.sources.count("prediction") > 8
        assert policy.accepted == request.stats.sources.count("prompt-lookup") > 0
        assert 0 < policy.asked <= policy.told < len(request.stats.rounds)

    def test_a_drafter_on_the_targets_cache_comes_first(self) -> None:
        llm = loaded("early-exit")
        with pytest.raises(OptionError, match="'exit' drafts on the target's own cache"):
            Dispatch(llm.target, {"none": llm.method("none").drafter, "exit": llm.drafter})


class Watched(Fixed):
    """Counts the rounds it is asked about and told of, and the tokens that it is told were accepted."""

    asked = told = accepted = 0

    def more(self, depth: int) -> bool:
        self.asked += depth == 0
        return super().more(depth)

    def reach(self, most: int) -> int:
        self.asked += most > 0
        return super().reach(most)

    def observe(self, drafted: int, accepted: int) -> None:
        assert accepted <= drafted
        self.told, self.accepted = self.told + 1, self.accepted + accepted


class Shown(Fixed):
    """A policy that looks at the target's last hidden state."""

    reads_hidden = True

    def begin_round(self, hidden: Tensor) -> None:
        assert hidden.isfinite().all()


class TestPrefixes:
    @exact
    @pytest.mark.parametrize("drafter", ["prompt-lookup", "early-exit", "eagle"])
    def test_a_conversation_goes_on(self, drafter: str) -> None:
        llm = loaded(drafter)
        engine = Engine(llm.target, llm.drafter, rows=2, slots=80, prefixes=PrefixStore(60))
        prompt, reused = [*range(10)], []
        for _ in range(3):
            [request] = llm.requests([prompt], max_new_tokens=6, eos=())
            [*_] = engine.run([request])
            assert request.output == loaded("none").generate(prompt, max_new_tokens=6, eos=()).tokens
            reused.append(request.stats.reused_tokens)
            prompt = [*request.ids, 50, 51]
        assert reused == [0, 15, 23]  # a text's last token was never read

    @exact
    def test_of_some_states_more_is_kept_than_of_others(self) -> None:
        """Where another drafter reads one of those that EAGLE-3's head fuses, and wants all of it."""
        parts = {name: loaded(name).drafter for name in ("early-exit", "eagle-3")}
        assert set(parts["early-exit"].kept_taps) < set(parts["eagle-3"].taps)
        target = loaded("none").target
        engine = Engine(target, Dispatch(target, parts), rows=1, slots=120, prefixes=PrefixStore(200))
        for prompt in ([*range(60)], [*range(60), 7, 8]):
            request = Request(prompt, limit=6, policy=Fixed(k=3), drafter="eagle-3")
            [*_] = engine.run([request])
            assert request.stats.drafted > 0
            assert request.output == loaded("none").generate(prompt, max_new_tokens=6, eos=()).tokens
        assert request.stats.reused_tokens > 50

    @exact
    @pytest.mark.parametrize("drafter", ["none", "medusa", "eagle", "eagle-3"])
    def test_a_prompt_that_is_known_is_not_read(self, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
        llm, prompt = loaded(drafter), [*range(20)]
        engine = Engine(llm.target, llm.drafter, rows=1, slots=80, prefixes=PrefixStore(60))
        first, again, shown = llm.requests([prompt] * 3, max_new_tokens=6, eos=())
        [*_] = engine.run([first])
        read, run = list[int](), llm.target._prefill_pass

        def watched(span: Span, cache: KVCache, taps: Collection[int]) -> dict[int, Tensor]:
            read.append(span.width)
            return run(span, cache, taps)

        monkeypatch.setattr(llm.target, "_prefill_pass", watched)
        [*_] = engine.run([again])
        assert again.stats.reused_tokens == 19
        assert read == []
        shown.policy = Shown(k=2)
        [*_] = engine.run([shown])
        assert shown.stats.reused_tokens == 18
        assert read == [1]  # its state is what the policy asks for
        assert first.output == again.output == shown.output

    def test_the_oldest_go(self) -> None:
        llm, store = looked_up(), PrefixStore(50)
        engine = Engine(llm.target, llm.drafter, prefixes=store)
        for first in (10, 30, 50, 10, 50):
            [*_] = engine.run(llm.requests([[*range(first, first + 17)]], max_new_tokens=4, eos=()))
        assert store.tokens == 40
        assert store.queries == 80
        assert store.hits == 16
        [*_] = engine.run(llm.requests([[*range(100)]], max_new_tokens=4, eos=()))
        assert store.tokens == 40  # it would not fit
        with pytest.raises(OptionError):
            PrefixStore(0)


class TestLongPrompts:
    @exact
    def test_others_keep_moving(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (batch, reading):
            monkeypatch.setattr(module, "PREFILL_CHUNK", 16)
        llm = loaded("none")
        engine = Engine(llm.target, llm.drafter, rows=3, slots=200)
        first, second, long = llm.requests([[1], [2], [*range(100)]], max_new_tokens=12, eos=())
        first.limit = 3
        for request in (first, second, long):
            engine.add(request)
        counts = []
        while not long.output:
            engine.step()
            counts.append(len(second.output))
        assert counts == [1, 2, 3, 4, 5, 6, 7]  # the prompt takes seven chunks
        while not engine.idle:
            engine.step()
        assert long.output == llm.generate([*range(100)], max_new_tokens=12, eos=()).tokens

    def test_a_prompt_can_be_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (batch, reading):
            monkeypatch.setattr(module, "PREFILL_CHUNK", 16)
        llm = looked_up()
        engine = Engine(llm.target, llm.drafter, rows=1, slots=200)
        [request] = llm.requests([[*range(100)]], max_new_tokens=12)
        engine.add(request)
        engine.step()
        assert not engine.idle
        engine.cancel(request)
        assert engine.idle
        assert request.finish_reason == "cancelled"
