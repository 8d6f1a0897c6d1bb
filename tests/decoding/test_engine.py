"""The engine: its cache after every round, requests that come and go, and the record."""

from __future__ import annotations

import errno
import gc
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import Oracle, hf_greedy, perturbed, small_neox
from paceline.clock import MadeUpClock, made_up
from paceline.decoding.engine import Engine
from paceline.decoding.request import Request
from paceline.decoding.stats import PHASES, Clock, Round, Stats
from paceline.decoding.verify import verify
from paceline.drafters.draft_model import DraftModel
from paceline.drafters.merge import Merge
from paceline.drafters.none import NoDrafter
from paceline.drafters.prompt_lookup import PromptLookup
from paceline.drafting.autoregressive import Step
from paceline.drafting.base import Row
from paceline.drafting.budget import Budget
from paceline.drafting.tree import TokenTree
from paceline.drafting.tree_drafter import TreeDrafter
from paceline.errors import ContextOverflow, OptionError
from paceline.policies.base import StoppingPolicy
from paceline.policies.fixed import Fixed
from paceline.targets.cache import KVCache
from paceline.targets.cost_model import Costs, LearnedCosts
from paceline.targets.costs import costs_of, set_costs
from paceline.targets.reference import BlockTarget
from paceline.targets.target import PassOutput, Target
from tiny import small_llama

TARGETS = {name: BlockTarget(make()) for name, make in (("llama", small_llama), ("gpt_neox", small_neox))}
NEW = 10
PROMPTS = {name: [[n] * n + [3, 4] for n in (1, 7, 2, 12, 5)] for name in TARGETS}
TRUTHS = {name: {tuple(p): hf_greedy(target.model, p, NEW) for p in PROMPTS[name]} for name, target in TARGETS.items()}


def check_cache(target: Target, rows: Sequence[Row], cache: KVCache) -> None:
    """The invariant at every round's start: a row's cache is that of a fresh prefill of all its tokens but the last."""
    for slot, row in enumerate(rows):
        assert row.slot == slot
        committed = row.ids[:-1]
        assert cache.lengths[slot] == len(committed)
        fresh = target.new_cache(1, len(committed) + 1)
        target.prefill(committed, fresh)
        got = cache.store[:, :, slot, :, : len(committed)]
        torch.testing.assert_close(got, fresh.store[:, :, 0, :, : len(committed)], rtol=0, atol=3e-6)


class Watched(Oracle):
    """Checks the target's cache before every round, and what it is told after it."""

    taps = (0, 2)

    def start(self, cache: KVCache) -> None:
        self.cache, self.rounds = cache, 0

    def begin(self, row: Row, hidden: dict[int, torch.Tensor]) -> None:
        super().begin(row, hidden)
        embedded = self.target.model.get_input_embeddings()(torch.tensor(row.ids[:-1], dtype=torch.long))
        torch.testing.assert_close(hidden[0], embedded)
        assert hidden[2].shape == embedded.shape

    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        self.rounds += 1
        check_cache(self.target, rows, self.cache)
        return super().draft(rows)

    def observe(self, row: Row, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        assert len(out.logits) == len(out.taps[2]) == len(tree)
        ids = self.target.model.get_input_embeddings()(torch.tensor(tree.tokens))
        torch.testing.assert_close(out.taps[0], ids)
        assert path == tree.path(path[-1])


@settings(max_examples=10)
@given(
    name=st.sampled_from(list(TARGETS)),
    order=st.permutations(range(5)),
    limits=st.lists(st.sampled_from([1, 4, NEW]), min_size=5, max_size=5),
    batch=st.integers(1, 5),
    k=st.integers(0, 6),
    seed=st.integers(0, 1000),
)
def test_cache_is_that_of_a_fresh_prefill(name, order, limits, batch, k, seed) -> None:
    """After any rounds over ragged rows, with rows that leave, move and join."""
    target, truths = TARGETS[name], TRUTHS[name]
    prompts = [PROMPTS[name][index] for index in order]
    requests = [Request(p, limit=limit, policy=Fixed(k=k)) for p, limit in zip(prompts, limits, strict=True)]
    drafter = Watched(target, truths, seed=seed)
    seen = list(Engine(target, drafter).run(requests, batch))
    assert len(seen) == sum(len(request.stats.rounds) for request in requests)
    assert drafter.rounds >= max(len(request.stats.rounds) for request in requests)
    for request, prompt, limit in zip(requests, prompts, limits, strict=True):
        assert request.output == truths[tuple(prompt)][:limit]


class Moody(StoppingPolicy):
    """Drafts nothing for a while, then a few tokens."""

    def __init__(self, idle: int, k: int = 3) -> None:
        self.limit, self.idle = k, idle

    def more(self, depth: int) -> bool:
        return self.idle <= 0 and depth < self.limit

    def observe(self, drafted: int, accepted: int) -> None:
        self.idle -= 1


class WatchedDraftModel(DraftModel):
    """Checks the draft model's cache whenever it is about to draft, and how often it is right."""

    def step(self, rows: Sequence[Row], trees: Sequence[TokenTree], depth: int) -> Step:
        for row, tree in zip(rows, trees, strict=True):
            read = self.cache.lengths[row.slot]
            if depth > 0 and len(tree) <= depth:
                continue  # no longer drafting
            fresh = self.drafter.new_cache(1, 64)
            self.drafter.prefill((row.ids + tree.tokens[1:])[:read], fresh)
            got = self.cache.store[:, :, row.slot, :, :read]
            torch.testing.assert_close(got, fresh.store[:, :, 0, :, :read], rtol=0, atol=3e-6)
        return super().step(rows, trees, depth)


@settings(max_examples=10)
@given(
    idle=st.lists(st.integers(0, NEW + 2), min_size=5, max_size=5),
    batch=st.integers(1, 5),
    noise=st.sampled_from([0.0, 0.03, 0.1]),
)
def test_draft_models_cache(idle: list[int], batch: int, noise: float) -> None:
    """The same of the draft model's, whatever it drafted, was refused, or had no part in for rounds on end."""
    target = TARGETS["llama"]
    drafter = WatchedDraftModel(target, model=BlockTarget(perturbed(small_llama(), noise)))
    requests = [
        Request(prompt, limit=NEW - index, policy=Moody(rounds))
        for index, (prompt, rounds) in enumerate(zip(PROMPTS["llama"], idle, strict=True))
    ]
    for _ in Engine(target, drafter).run(requests, batch):
        pass
    for request in requests:
        assert request.output == TRUTHS["llama"][tuple(request.ids[: request.prompt_length])][: request.limit]
        if noise == 0:
            assert request.stats.accepted == request.stats.drafted


class Knowing(TreeDrafter):
    """Proposes what comes next, but for its first token in some rounds."""

    def propose(self, row: Row, memory: object, depth: int, min_score: float) -> TokenTree:
        tree, known = TokenTree.root(row.ids[-1]), TRUTHS["llama"][tuple(PROMPTS["llama"][1])]
        done = len(row.ids) - len(PROMPTS["llama"][1])
        for node, token in enumerate(known[done : done + 3 * (done % 3 > 0)]):
            tree.add(token, node, "knowing", score=0.9)
        return tree


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_draft_models_cache_beside_another_drafter(noise: float) -> None:
    """Whose tokens are accepted in place of its own."""
    target = TARGETS["llama"]
    watched = WatchedDraftModel(target, model=BlockTarget(perturbed(small_llama(), noise)))
    merge = Merge(target, drafters=[watched, Knowing(target, 6)], budget=6)
    request = Request(PROMPTS["llama"][1], limit=NEW, policy=Fixed(k=4))
    for _ in Engine(target, merge).run([request]):
        pass
    assert request.output == TRUTHS["llama"][tuple(PROMPTS["llama"][1])]


def test_a_wide_draft_beside_a_row_that_is_nearly_full() -> None:
    """It would widen the other row's pass as well: it waits until there is room for that."""
    target = TARGETS["llama"]
    drafter = PromptLookup(target, budget=16)
    full, wide = (
        Request([1, 2], limit=30, policy=Fixed(k=0)),
        Request([3, 4, 5, 6, 7, 8, 9] * 2, limit=6, policy=Fixed(k=8)),
    )
    engine = Engine(target, drafter, rows=2, slots=33)
    engine.add(full)
    for _ in range(28):
        engine.step()
    engine.add(wide)
    engine.step()
    assert engine.running == [full]
    while not engine.idle:
        engine.step()
    for request in (full, wide):
        assert request.output == hf_greedy(target.model, request.ids[: request.prompt_length], request.limit)


def test_draft_model_catches_up_beside_a_full_row() -> None:
    """What a row has left to read must not widen the pass of one whose cache is nearly full."""
    target = TARGETS["llama"]
    drafter = DraftModel(target, model=target)
    lagging, filler, full = (
        Request(prompt, limit=limit, policy=Moody(idle))
        for prompt, limit, idle in zip(
            PROMPTS["llama"][:1] + PROMPTS["llama"][2:4], (NEW, 8, 2), (8, 99, 0), strict=True
        )
    )
    for _ in Engine(target, drafter).run([lagging, filler, full], batch=2):
        pass
    for request in (lagging, filler, full):
        assert request.output == TRUTHS["llama"][tuple(request.ids[: request.prompt_length])][: request.limit]
    assert full.stats.accepted == lagging.stats.accepted == 1


class TestRun:
    target = TARGETS["llama"]

    def requests(self, *limits: int) -> list[Request]:
        return [Request([n + 1, 2], limit=limit, policy=Fixed(k=0)) for n, limit in enumerate(limits)]

    def run(self, requests: list[Request], batch: int | None = None) -> list[Request]:
        return list(Engine(self.target, NoDrafter(self.target)).run(requests, batch))

    def test_rows_come_and_go(self) -> None:
        """A request joins as soon as there is a row; each is yielded after every round it took part in."""
        a, b, c, d = requests = self.requests(1, 3, 2, 1)
        got = self.run(requests, batch=2)
        assert got == [a, b, b, c, b, c, d]
        assert [got.count(request) for request in requests] == [1, 3, 2, 1]
        assert all(request.finish_reason == "length" for request in requests)

    def test_nothing_to_do(self) -> None:
        assert self.run([]) == []

    @pytest.mark.parametrize("batch", [0, -1])
    def test_batch_below_one(self, batch: int) -> None:
        with pytest.raises(OptionError, match="batch must be at least 1"):
            self.run(self.requests(1), batch)

    def test_engine_is_reusable(self) -> None:
        engine = Engine(self.target, NoDrafter(self.target))
        first, second = self.requests(4, 4), self.requests(4, 4)
        for _ in engine.run(first):
            break  # a consumer that stops half-way
        for _ in engine.run(second):
            pass
        assert [len(request.output) for request in second] == [4, 4]

    def test_one_that_is_left_when_the_program_ends_says_nothing(self) -> None:
        """What it would be cancelled with has gone by then."""
        lines = [
            f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})",
            "import paceline; from tiny import small_llama",
            "llm = paceline.load(small_llama(), drafter='none')",
            "run = llm.run(llm.requests([[1, 2, 3]])); next(run)",
        ]
        done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
        assert "ignored" not in done.stderr

    def test_gradients_are_off(self) -> None:
        [request] = self.requests(2)
        run = Engine(self.target, NoDrafter(self.target)).run([request])
        next(run)
        assert torch.is_grad_enabled()  # and on again for whoever consumes
        assert not torch.is_inference_mode_enabled()


class TestStats:
    def test_record_of_a_run(self) -> None:
        target, truths = TARGETS["llama"], TRUTHS["llama"]
        prompt = PROMPTS["llama"][1]
        request = Request(prompt, limit=NEW, policy=Fixed(k=4))
        began = time.perf_counter()
        for _ in Engine(target, Oracle(target, truths, ["truth"])).run([request]):
            pass
        wall = time.perf_counter() - began
        stats = request.stats
        assert [(r.drafted, r.depth, r.accepted, r.emitted) for r in stats.rounds] == [(4, 4, 4, 5), (4, 4, 4, 5)]
        assert stats.sources == (["oracle"] * 4 + ["target"]) * 2
        assert (stats.prompt_tokens, stats.tokens, stats.drafted, stats.accepted) == (len(prompt), NEW, 8, 8)
        assert stats.tau == 5
        assert 0 < stats.prefill_seconds < stats.seconds <= wall
        assert set(stats.split) == set(PHASES)
        assert sum(stats.split.values()) <= stats.seconds - stats.prefill_seconds
        assert stats.tokens_per_s == pytest.approx(NEW / stats.seconds)

    def test_metrics(self) -> None:
        seconds = dict.fromkeys(PHASES, 0.5)
        stats = Stats(3, [Round(4, 4, 3, 4, seconds), Round(2, 2, 0, 1, seconds)], ["x"] * 3 + ["target"] * 2)
        assert (stats.tau, stats.v_d, stats.r_d) == (2.5, 0.5, 0.6)
        assert stats.split == dict.fromkeys(PHASES, 1.0)
        assert stats.as_dict()["v_d"] == 0.5

    def test_of_nothing(self) -> None:
        made = Stats().as_dict()
        assert made.pop("split") == dict.fromkeys(PHASES, 0)
        assert set(made.values()) == {0}

    def test_clock(self) -> None:
        clock = Clock()
        time.sleep(0.01)
        clock.lap("draft")
        clock.lap("verify")
        assert clock.seconds["draft"] >= 0.01 > clock.seconds["verify"]
        assert clock.seconds["sample"] == 0


class TestSteps:
    """Requests that join, decode and are given up one round at a time."""

    target = TARGETS["llama"]

    def engine(self, **size: int) -> Engine:
        return Engine(self.target, NoDrafter(self.target), **size)

    def request(self, limit: int, ids: Sequence[int] = (1, 2)) -> Request:
        return Request(ids, limit=limit, policy=Fixed(k=0))

    def test_a_round_tells_what_each_row_emitted(self) -> None:
        engine, a, b = self.engine(rows=2, slots=16), self.request(2), self.request(3)
        assert engine.step() == []
        engine.add(a)
        assert [(request, len(tokens)) for request, tokens in engine.step()] == [(a, 1)]
        engine.add(b)  # while the other decodes
        assert {request: len(tokens) for request, tokens in engine.step()} == {a: 1, b: 1}
        assert (a.finish_reason, b.finish_reason) == ("length", None)
        assert [[request for request, _ in engine.step()] for _ in range(2)] == [[b], [b]]
        assert engine.idle
        assert a.output == b.output[:2]

    def test_rows_are_taken_in_order(self) -> None:
        engine, requests = self.engine(rows=1, slots=16), [self.request(1), self.request(2), self.request(1)]
        for request in requests:
            engine.add(request)
        order = [request for _ in range(4) for request, _ in engine.step()]
        assert order == [requests[0], requests[1], requests[1], requests[2]]

    def test_a_fixed_cache_refuses_what_never_fits(self) -> None:
        engine = self.engine(rows=1, slots=8)
        with pytest.raises(ContextOverflow, match=r"need 9 slots of the KV cache; this engine's rows have 8$"):
            engine.add(self.request(6))
        with pytest.raises(ContextOverflow, match="need 9 slots"):
            next(engine.run([self.request(2), self.request(6)]))
        assert engine.idle
        engine.add(self.request(5))
        assert len(engine.step()) == 1

    @pytest.mark.parametrize(
        "error",
        [
            OSError(errno.ENOMEM, "Cannot allocate memory"),
            MemoryError(),
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        ],
    )
    def test_a_cache_that_memory_does_not_hold(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        def new_cache(rows: int, slots: int) -> KVCache:
            raise error

        monkeypatch.setattr(self.target, "new_cache", new_cache)
        with pytest.raises(OptionError, match="no memory for the KV cache of 5 rows of 16 tokens"):
            self.engine(rows=5, slots=16)

    def test_a_growing_cache_is_made_anew_for_what_does_not_fit(self) -> None:
        engine, small, large = self.engine(), self.request(3), self.request(40)
        engine.add(small)
        engine.step()
        engine.add(large)
        assert [request for request, _ in engine.step()] == [small]  # the other waits
        engine.step()
        assert small.finish_reason
        while not engine.idle:
            engine.step()
        assert len(large.output) == 40
        assert large.output[:3] == small.output

    def test_cancelled_requests_leave_at_once(self) -> None:
        engine, requests = self.engine(rows=2, slots=32), [self.request(9, [n, 5]) for n in range(3)]
        alone = [list(self.engine().run([self.request(9, [n, 5])]))[-1].output for n in range(3)]
        for request in requests:
            engine.add(request)
        engine.step()
        engine.cancel(requests[0])  # its row goes to the one that waits
        assert {request for request, _ in engine.step()} == set(requests[1:])
        assert (requests[0].finish_reason, len(requests[0].output)) == ("cancelled", 1)
        waiting = self.request(9)
        engine.add(waiting)
        engine.cancel(waiting)
        while not engine.idle:
            engine.step()
        assert (waiting.finish_reason, waiting.output) == ("cancelled", [])
        assert [request.output for request in requests[1:]] == alone[1:]
        engine.cancel(requests[1])
        assert requests[1].finish_reason == "length"

    def test_what_is_cancelled_amidst_a_round_ends_with_it(self) -> None:
        """As from a criterion, or where Python closes a forgotten run: rows stay where they are till then."""
        engine, (first, last) = self.engine(rows=3, slots=32), (self.request(5, [9, 1]), self.request(5, [9, 2]))
        alone = [list(self.engine().run([self.request(5, [9, n])]))[-1].output for n in (1, 2)]

        def give_up(ids: torch.Tensor, scores: object) -> torch.Tensor:
            if ids.shape[1] == 4:
                engine.cancel(asking, first)
            return torch.tensor([False])

        asking = Request([1, 2], limit=5, policy=Fixed(k=0), stop_when=give_up)
        for request in (asking, first, last):
            engine.add(request)
        while not engine.idle:
            engine.step()
        assert [request.finish_reason for request in (asking, first, last)] == ["cancelled", "cancelled", "length"]
        assert (len(asking.output), first.output, last.output) == (2, alone[0][:2], alone[1])

    def test_a_forgotten_run_is_closed_amidst_a_round(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = self.engine(rows=2, slots=32)
        alone = list(self.engine().run([self.request(6)]))[-1].output

        class Chat:
            def __init__(self) -> None:
                self.run, self.itself = engine.run([forgotten]), self

        def collected(*given: Any) -> Any:
            gc.collect()
            return verify(*given)

        forgotten, request = self.request(20, [7, 7]), self.request(6)
        chat = Chat()
        next(chat.run)
        told = engine.run([request])
        next(told)
        monkeypatch.setattr("paceline.decoding.engine.verify", collected)
        del chat
        list(told)
        assert (forgotten.finish_reason, request.output) == ("cancelled", alone)
        assert engine.idle

    def test_it_does_not_decode_in_a_callback_of_its_own(self) -> None:
        engine = self.engine(rows=2, slots=32)

        def decode(ids: torch.Tensor, scores: object) -> torch.Tensor:
            list(engine.run([self.request(2)]))
            return torch.tensor([False])

        with pytest.raises(OptionError, match="one step at a time"):
            list(engine.run([Request([1, 2], limit=5, policy=Fixed(k=0), stop_when=decode)]))
        assert engine.idle

    def test_cancelled_before_a_run_takes_it_up(self) -> None:
        engine, requests = self.engine(), [self.request(2) for _ in range(3)]
        for at, _ in enumerate(engine.run(requests, batch=1)):
            if at == 0:
                engine.cancel(requests[1])
        assert [request.finish_reason for request in requests] == ["length", "cancelled", "length"]
        assert [len(request.output) for request in requests] == [2, 0, 2]

    def test_a_run_that_is_given_up_leaves_nothing_where_the_drafter_fails(self) -> None:
        class Clumsy(NoDrafter):
            def end(self, row: Row) -> None:
                raise RuntimeError("no end")

        engine = Engine(self.target, Clumsy(self.target))
        run = engine.run([self.request(9), self.request(9)])
        next(run)
        with pytest.raises(RuntimeError, match="no end"):
            run.close()
        assert not engine.busy
        assert engine.capacity == (0, 0)

    def test_the_cache_goes_with_the_last_request_that_is_cancelled(self) -> None:
        engine, request = self.engine(), self.request(9)
        engine.add(request)
        engine.step()
        engine.cancel(request)
        assert engine.idle
        assert engine.capacity == (0, 0)

    def test_runs_take_turns(self) -> None:
        """Each is told of all rounds of its own requests, and a run that is given up takes them along."""
        engine, (a, b, c) = self.engine(rows=3, slots=32), (self.request(n) for n in (5, 3, 8))
        first, second, third = engine.run([a]), engine.run([b]), engine.run([c])
        turns = [next(run) for run in (first, second, third, first, second)]
        assert turns == [a, b, c, a, b]
        third.close()
        assert c.finish_reason == "cancelled"
        list(first), list(second)
        assert (a.output, b.output) == (b.output + a.output[3:], a.output[:3])
        assert engine.idle

    def test_a_round_that_fails_ends_all_that_took_part(self) -> None:
        """How far each of them came, nobody knows; those that come later are not harmed."""

        def fail(ids: torch.Tensor, scores: object) -> torch.Tensor:
            raise RuntimeError("the criterion failed")

        engine, (before, after) = self.engine(rows=3, slots=16), (self.request(4), self.request(4))
        failing = Request([1, 2], limit=4, policy=Fixed(k=0), stop_when=fail)
        for request in (before, failing, after):
            engine.add(request)
        with pytest.raises(RuntimeError, match="criterion"):
            engine.step()
        assert engine.idle
        assert [request.finish_reason for request in (before, failing, after)] == ["cancelled"] * 3
        assert {str(request.error) for request in (before, failing, after)} == {"the criterion failed"}
        again, alone = self.request(4), self.request(4)
        engine.add(again)
        while not engine.idle:
            engine.step()
        list(self.engine().run([alone]))
        assert again.output == alone.output

    def test_a_drafter_that_fails_at_an_end_keeps_no_other_row(self) -> None:
        class Clumsy(NoDrafter):
            def end(self, row: Row) -> None:
                raise RuntimeError("no end")

        engine = Engine(self.target, Clumsy(self.target), rows=3, slots=16)
        short, long = (self.request(2), self.request(2)), self.request(3)
        for request in (*short, long):
            engine.add(request)
        for ended in (short, (long,)):
            with pytest.raises(RuntimeError, match="no end"):
                [engine.step() for _ in range(9)]
            assert all(request.finish_reason == "length" for request in ended)
        assert engine.idle
        assert [len(request.output) for request in (*short, long)] == [2, 2, 3]

    @pytest.mark.parametrize(("error", "told"), [(RuntimeError("no memory"), True), (KeyboardInterrupt(), False)])
    def test_a_round_that_fails_is_told_to_all_runs(
        self, monkeypatch: pytest.MonkeyPatch, error: BaseException, told: bool
    ) -> None:
        """Not only to the one that called it; who interrupts one run means no other."""

        def fail(rows: list[Request]) -> None:
            raise error

        engine, (a, b) = self.engine(rows=2, slots=32), (self.request(9), self.request(9))
        first, second = engine.run([a]), engine.run([b])
        next(first), next(second)
        monkeypatch.setattr(engine, "_round", fail)
        with pytest.raises(type(error)):
            list(first)
        assert (a.finish_reason, b.finish_reason) == ("cancelled", "cancelled")
        if told:
            with pytest.raises(RuntimeError, match="no memory"):
                list(second)
        else:
            list(second)
        assert engine.idle

    def test_a_prompt_that_cannot_be_read_ends_its_own_request_only(self) -> None:
        class Picky(NoDrafter):
            def begin(self, row: Row, hidden: object) -> None:
                if row.ids[0] == 9:
                    raise ValueError("not this prompt")

        engine = Engine(self.target, Picky(self.target), rows=2, slots=16)
        good, bad = self.request(3), self.request(3, [9, 2])
        engine.add(good)
        engine.add(bad)
        engine.step()
        assert (bad.finish_reason, str(bad.error), bad.output) == ("error", "not this prompt", [])
        one, other = engine.run([self.request(5)]), engine.run([self.request(2, [9, 2])])
        next(one)  # this step would have let both in
        with pytest.raises(ValueError, match="not this prompt"):
            next(other)
        assert len(list(one)[-1].output) == 5
        assert len(good.output) == 3

    def test_a_drafter_follows_one_engine_at_a_time(self) -> None:
        """Whoever is idle may take it over; its buffers are then made for the other cache."""
        drafter = DraftModel(self.target, model=self.target)
        fixed, other = Engine(self.target, drafter, rows=1, slots=24), Engine(self.target, drafter)
        alone = list(self.engine().run([self.request(8)]))[-1].output

        def ask() -> Request:
            return Request([1, 2], limit=8, policy=Fixed(k=2))

        for engine in (fixed, other, fixed):
            [*_, last] = engine.run([ask()])
            assert last.output == alone
        fixed.add(first := ask())
        fixed.step()
        with pytest.raises(OptionError, match="another engine is decoding with this drafter"):
            next(other.run([ask()]))
        while not fixed.idle:
            fixed.step()
        assert first.output == alone
        run = other.run(requests := [ask(), ask()], batch=1)
        while not requests[0].finish_reason:
            next(run)
        with pytest.raises(OptionError, match="another engine is decoding with this drafter"):
            list(fixed.run([ask()]))  # the other one rests only until its next request
        list(run)
        assert requests[1].output == alone

    def test_an_idle_engine_without_a_size_keeps_no_cache(self) -> None:
        engine = self.engine()
        engine.add(self.request(2))
        engine.step()
        assert engine._cache is not None
        engine.step()
        assert engine.idle
        assert engine._cache is None

    def test_a_request_is_decoded_once(self) -> None:
        engine, request = self.engine(rows=1, slots=16), self.request(2)
        engine.add(request)
        with pytest.raises(OptionError, match="decoded once"):
            engine.add(request)
        while not engine.idle:
            engine.step()
        with pytest.raises(OptionError, match="decoded once"):
            next(engine.run([request]))

    @pytest.mark.parametrize("size", [{"rows": 2}, {"slots": 8}, {"rows": 0, "slots": 8}, {"rows": 1, "slots": 0}])
    def test_sizes_that_are_none(self, size: dict[str, int]) -> None:
        with pytest.raises(OptionError, match=r"rows and slots|1 row and 1 slot"):
            self.engine(**size)


def test_a_callbacks_time_is_none_of_a_plain_pass() -> None:
    target = BlockTarget(small_llama())
    plain = set_costs(target, LearnedCosts({1: 1.0, 16: 1.1}))
    others, before = costs_of(target, plain=False), plain(1)

    def slow(*_: object) -> torch.Tensor:
        clock.spend(5.0)
        return torch.tensor([False])

    with made_up(MadeUpClock()) as clock:
        request = Request([1, 2, 3], limit=20, policy=Fixed(k=0), stop_when=slow)
        list(Engine(target, NoDrafter(target)).run([request]))
    assert plain(1) == before
    assert others(1) > 2.0


def test_what_passes_between_rounds_counts() -> None:
    """While there is something to decode: a rest is no round's time."""
    target = BlockTarget(small_llama())
    costs = set_costs(target, Costs({1: 1.0, 16: 1.1}))
    engine, alone = Engine(target, NoDrafter(target), rows=1, slots=33), Budget(costs).rate(1)
    with made_up(MadeUpClock()) as clock:
        for _ in range(2):
            request = Request([1, 2, 3], limit=10, policy=Fixed(k=4))
            engine.add(request)
            for _ in range(4):
                engine.step()
                clock.spend(0.25)
            engine.cancel(request)
            clock.spend(1000.0)
    assert costs.between == pytest.approx(0.25)
    assert Budget(costs).rate(1) == pytest.approx(alone / 1.25)
