"""The guide: the library computes what the module does, and text never depends on it."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import paceline
from drafters.ngrams import discounted
from paceline.drafters.auto import Auto
from paceline.drafters.suffix import Suffix
from paceline.drafters.trigram.drafter import Trigram
from paceline.drafters.trigram.guide import SHIPPED, Guide
from paceline.drafters.trigram.lookup import Memory, TrigramLookup
from paceline.drafters.trigram.matrix import token_bits
from paceline.drafters.trigram.structures import WIDTH, Plan, Rule
from paceline.drafting.base import Drafter
from paceline.drafting.heads import FINGERPRINT
from paceline.drafting.lookup import Candidates
from paceline.drafting.output_rows import output_rows
from paceline.errors import CheckpointError, CheckpointMismatch, OptionError
from paceline.targets import make_target
from paceline.targets.native import available
from paceline.targets.reference import as_target
from paceline.targets.span import Span
from tiny import small_llama

pytestmark = pytest.mark.skipif(not available(), reason="needs a C++ compiler with OpenMP")


def llama(seed: int = 0, **config: object) -> LlamaForCausalLM:
    return small_llama(seed, **config).float()


PROMPT = [5, 9, 2, 5, 9, 2, 5, 9]


def drawn_guide(model: torch.nn.Module, **sizes: int) -> Guide:
    """One that says something of every candidate."""
    guide = Guide.from_target(model, **{"rank": 32, "inner": 32, **sizes})
    drawn = torch.Generator().manual_seed(1)
    for part in (guide.ask, guide.weigh):
        part.weight.data = 0.3 * torch.randn(part.weight.shape, generator=drawn)
    return guide


class TestLibrary:
    @pytest.mark.parametrize("tier", ["reference", "torch", "native"])
    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize("size", [64, 40])  # whole blocks or not
    def test_it_computes_what_the_module_does(self, tier: str, tied: bool, size: int) -> None:
        model = llama(hidden_size=size, tie_word_embeddings=tied)
        guide = drawn_guide(model, rank=64)
        target = make_target(model, tier=tier)
        plain, guided = (Trigram(target, guide=which, budget=WIDTH, candidates=WIDTH) for which in ("none", guide))
        before, memory = plain.lookup.begin(PROMPT), guided.lookup.begin(PROMPT)
        alone = plain.lookup.propose(PROMPT, before, 1, WIDTH)
        assert guided.lookup.propose(PROMPT, memory, 1, WIDTH) == alone  # while no state is known
        memory.hidden = torch.randn(size, generator=torch.Generator().manual_seed(2))
        found = guided.lookup.propose(PROMPT, memory, 1, WIDTH)
        assert set(found.tokens) == set(alone.tokens)
        candidates, probs = torch.tensor([alone.tokens]), torch.tensor([alone.scores])
        matrix = output_rows(target, None)
        guide.know(guide.embedding, matrix)
        logits = guide(memory.hidden[None], torch.tensor(PROMPT[-1:]), candidates, probs, probs)  # all are its own
        wanted = dict(zip(alone.tokens, logits.softmax(-1)[0, :-1].tolist(), strict=True))
        assert dict(zip(found.tokens, found.scores, strict=True)) == pytest.approx(wanted, abs=0.02)
        assert found.scores == sorted(found.scores, reverse=True)

    def test_only_the_first_tokens_are_guided(self) -> None:
        model = llama()
        guide = drawn_guide(model)
        guided = Trigram(make_target(model, tier="native"), guide=guide, budget=WIDTH, candidates=WIDTH)
        memory = guided.lookup.begin(PROMPT)
        alone = guided.lookup.propose(PROMPT, memory, 3, WIDTH)
        memory.hidden = torch.randn(guided.target.config.hidden_size)
        found = guided.lookup.propose(PROMPT, memory, 3, WIDTH)

        def shares(candidates: Candidates) -> dict[tuple[int, ...], float]:
            scores = [1.0, *candidates.scores]
            paths = {tuple(candidates.tokens[at - 1] for at in candidates.path(n)): n for n in range(1, len(scores))}
            return {path: scores[n] / scores[candidates.parents[n - 1]] for path, n in paths.items() if len(path) > 1}

        assert shares(found) == pytest.approx(shares(alone), rel=1e-5)

    def test_single_paths_begin_with_the_trees_best(self) -> None:
        model = llama()
        guide = drawn_guide(model)
        guided = Trigram(make_target(model, tier="native"), guide=guide, matrix="none", candidates=WIDTH)
        lookup, drawn = guided.lookup, torch.Generator().manual_seed(4)
        texts = [PROMPT, [1, 7, 1, 3, 1, 9, 1], PROMPT, [3, 8, 3, 5, 3]]
        memories = [lookup.begin(ids) for ids in texts]
        for memory in memories[:3]:
            lookup.told(memory, 4 * torch.randn(guided.target.config.hidden_size, generator=drawn))
        trees = [lookup.propose(ids, memory, 1, 12) for ids, memory in zip(texts, memories, strict=True)]
        lookup.to_chains()
        chains = lookup.propose_all(texts, memories, 3, 12)
        for tree, path in zip(trees, chains, strict=True):
            assert path.is_chain
            assert len(path.tokens) == 3
            assert path.tokens[0] == tree.tokens[0]
            assert path.scores[0] == pytest.approx(tree.scores[0], rel=1e-6)
        assert chains[0] != chains[2]


small = st.integers(0, 11)


@given(ids=st.lists(small, min_size=2, max_size=60), corpus=st.lists(small, min_size=1, max_size=60), data=st.data())
@settings(max_examples=40, deadline=None)
def test_what_it_learns_from_is_what_drafts_see(ids: list[int], corpus: list[int], data: st.DataObject) -> None:
    from paceline.drafters.trigram.guided import follow_up

    first = data.draw(st.integers(0, len(ids) - 1))
    matrix = discounted([corpus], 3, 12)
    rule = Rule(3, token_bits(12), False, 0.0, 1.0, 1.0)
    plan = Plan(0, 1.0, 1.0, 8, WIDTH, WIDTH, 0.0, 0, False)
    lookup = TrigramLookup(matrix, rule, plan, adapt="prompt", window=1, shared=0.0, seed=0, native=True)
    tokens, probs, own = follow_up(matrix, rule, ids, first)
    memory = lookup.begin(ids[: first + 1])
    for at in range(first, len(ids)):
        found = lookup.propose(ids[: at + 1], memory, 1, WIDTH)
        told = {int(t): float(p) for t, p in zip(tokens[at - first], probs[at - first], strict=True) if t >= 0}
        assert dict(zip(found.tokens, found.scores, strict=True)) == pytest.approx(told)
    assert (own <= probs * (1 + 1e-6)).all()


class TestText:
    @pytest.mark.parametrize("tier", ["torch", "native"])
    @pytest.mark.parametrize("batch", [1, 3])
    def test_greedy_text_is_that_without(self, tier: str, batch: int) -> None:
        model = llama()
        guide = drawn_guide(model)

        def drafter(target: paceline.Target) -> Trigram:
            return Trigram(target, guide=guide, matrix="none")

        prompts = [PROMPT, [1], [7, 3, 7, 3, 7, 3, 7]][:batch]
        plain, guided = (
            paceline.load(llama(), tier=tier, drafter=which, policy="fixed:k=6").generate(prompts, max_new_tokens=40)
            for which in ("none", drafter)
        )
        assert [one.tokens for one in guided] == [one.tokens for one in plain]
        assert sum(one.stats.drafted for one in guided) > 0

    @pytest.mark.parametrize("drafter", ["trigram", "auto"])
    @pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 2}])
    @torch.no_grad()
    def test_it_reads_the_state_that_told_the_last_token(
        self, drafter: str, sampling: dict[str, float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[tuple[list[int], torch.Tensor | None]] = []
        propose = TrigramLookup.propose

        def watched(self: TrigramLookup, ids: list[int], memory: Memory, *limits: float) -> Candidates:
            seen.append((list(ids), memory.hidden))
            return propose(self, ids, memory, *limits)

        monkeypatch.setattr(TrigramLookup, "propose", watched)
        guide = drawn_guide(llama())

        def made(target: paceline.Target) -> Drafter:
            part = Trigram(target, guide=guide, matrix="none", budget=12)
            return part if drafter == "trigram" else Auto(target, [part, Suffix(target)], budget=12)

        paceline.load(llama(), drafter=made).generate([PROMPT, [3, 1, 3, 1, 3]], max_new_tokens=30, **sampling)
        target, known = make_target(llama()), 0
        for ids, hidden in seen:
            if hidden is None:  # a request's first round
                assert ids in (PROMPT, [3, 1, 3, 1, 3])
                continue
            span = Span(torch.tensor([ids[:-1]]), np.zeros(1, np.int64))
            states = target.layers(target.embed(span), span, target.new_cache(1, len(ids)), 0, target.num_layers)
            torch.testing.assert_close(hidden, states[0, -1], rtol=1e-3, atol=1e-4)
            known += 1
        assert known > 10

    def test_a_seeds_own_sample_is_that_without(self) -> None:
        guide = drawn_guide(llama())
        samples = [
            paceline.load(llama(), drafter=which, verifier="match", tier="native").generate(
                PROMPT, max_new_tokens=40, temperature=0.8, seed=3
            )
            for which in ("none", lambda target: Trigram(target, guide=guide, matrix="none", budget=8))
        ]
        assert samples[0].tokens == samples[1].tokens


class TestFiles:
    def test_it_comes_back(self, tmp_path: Path) -> None:
        guide = drawn_guide(llama())
        guide.save(tmp_path, torch.float16)
        loaded = Guide.load(tmp_path, as_target(llama()))
        torch.testing.assert_close(loaded.ask.weight, guide.ask.weight, atol=1e-3, rtol=1e-3)

    def test_of_another_model(self, tmp_path: Path) -> None:
        drawn_guide(llama()).save(tmp_path)
        for other in (llama(hidden_size=64), llama(seed=5)):
            with pytest.raises(CheckpointMismatch):
                Trigram(make_target(other), guide=str(tmp_path))

    def test_damaged(self, tmp_path: Path) -> None:
        drawn_guide(llama()).save(tmp_path)
        (tmp_path / "guide.safetensors").write_bytes(b"no tensors")
        with pytest.raises(CheckpointError, match="damaged"):
            Trigram(make_target(llama()), guide=str(tmp_path))

    def test_none_is_found_or_needed(self, cache_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
        target = make_target(llama())
        with caplog.at_level(logging.WARNING, "paceline"):
            assert Trigram(target, guide="auto").taps == Auto(target).taps == ()
        assert not caplog.records
        with pytest.raises(OptionError, match="leave out guide"):
            Trigram(target, guide="auto", literal=True)

    def test_auto_does_without_one_that_does_not_fit(self, cache_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
        target, guide = make_target(llama(seed=5)), drawn_guide(llama())
        folder = guide.stored_path(target)
        guide.save(folder)
        with caplog.at_level(logging.WARNING, "paceline"):
            assert Auto(target).taps == ()
            assert not caplog.records
            (folder / "guide.safetensors").write_bytes(b"no tensors")
            assert Auto(target).taps == ()
            assert "damaged" in caplog.text

    def test_those_of_paceline_are_whole_and_small(self) -> None:
        folders = [path.parent for path in SHIPPED.glob("*/guide.json")]
        assert folders
        for folder in folders:
            guide = Guide.load(folder)
            assert guide.config.target.startswith(folder.name)
            weights = load_file(folder / "guide.safetensors")
            assert (folder / "guide.safetensors").stat().st_size < 16_000_000
            assert {tensor.dtype for name, tensor in weights.items() if name != FINGERPRINT} == {torch.float16}
            assert "paceline train guide" in (folder / "README.md").read_text(encoding="utf-8")

    def test_auto_takes_the_users_own(self, cache_dir: Path) -> None:
        target = make_target(llama())
        guide = drawn_guide(llama())
        guide.save(guide.stored_path(target))
        assert Auto(target).taps == (target.num_layers,)
        assert Auto(target, guide="none").taps == ()

    @pytest.mark.parametrize("sizes", [{"rank": 8}, {"inner": 40}])
    def test_sizes_are_whole_blocks(self, sizes: dict[str, int]) -> None:
        with pytest.raises(OptionError, match="multiple of 32"):
            Guide.from_target(llama(), **sizes)
