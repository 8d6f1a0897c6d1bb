from __future__ import annotations

import itertools
import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import optuna
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from paceline.api import LLM
from paceline.drafters.layer_skip.drafter import LayerSkip
from paceline.drafters.layer_skip.skip_set import SHIPPED, SkipSet, stored_path
from paceline.errors import ContextOverflow, OptionError, UnsupportedModel
from paceline.policies import POLICIES
from paceline.targets import Target, as_target
from paceline.targets.span import Span
from paceline.training.layer_skip import search as search_module
from paceline.training.layer_skip.cost import GreedyReplay, SkipCosts, measure, tau
from paceline.training.layer_skip.search import SearchProgress, search
from tiny import small_llama

PROMPTS = [list(b"one two one two"), list(b"abcabcab"), list(b"the cat, the dog"), list(b"x")]
SKIP = SkipSet(3, attention=(1,), mlp=(2,))
COSTS = SkipCosts(0.1, {"attention": 0.15, "mlp": 0.15}, (1.0, 1.02, 1.04, 1.06))  # of a model with 3 layers


@pytest.fixture(scope="module")
def target() -> Target:
    return as_target(small_llama(eos_token_id=54))  # two of the prompts lead to it


@pytest.fixture(scope="module")
def replay(target: Target) -> GreedyReplay:
    return GreedyReplay(target, PROMPTS, tokens=24)


@pytest.fixture(scope="module")
def idle() -> Target:
    """A target three of whose sublayers do nothing."""
    model = small_llama(eos_token_id=None)
    with torch.no_grad():
        for matrix in (
            model.model.layers[1].self_attn.o_proj,
            model.model.layers[0].mlp.down_proj,
            model.model.layers[2].mlp.down_proj,
        ):
            matrix.weight.zero_()
    return as_target(model)


# -- replay ------------------------------------------------------------------------------------------------------------
def test_text_is_the_targets_own(target: Target, replay: GreedyReplay) -> None:
    for row, prompt in enumerate(PROMPTS):
        own = target.model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0)
        assert replay.drafted[row, : replay.lengths[row]].tolist() == own[0, len(prompt) :].tolist()
    assert min(replay.lengths) < 24  # a row that ends early is among them


@torch.inference_mode()
def test_matches_what_a_draft_says_first(target: Target, replay: GreedyReplay) -> None:
    """Against one pass at a time over an exact cache."""
    for prompt, row, matches in zip(PROMPTS, replay.drafted.tolist(), replay.matches(SKIP.sublayers), strict=True):
        for at, right in enumerate(matches):
            ids, cache = prompt + row[:at], target.new_cache(1, 64)
            target.prefill(ids[:-1], cache)
            span = Span(torch.tensor([ids[-1:]]), cache.lengths.copy())
            hidden = target.layers(target.embed(span), span, cache, 0, 3, SKIP.sublayers)
            assert (int(target.head(hidden)[0, 0].argmax()) == row[at]) == right
    assert 0 < np.concatenate(replay.matches(SKIP.sublayers)).mean() < 1


def test_nothing_skipped_matches_everywhere(replay: GreedyReplay) -> None:
    assert all(row.all() for row in replay.matches(frozenset()))


def test_predicts_decoding_exactly_for_drafts_of_one(target: Target, replay: GreedyReplay) -> None:
    drafter = LayerSkip(target)
    drafter.skip = SKIP
    outputs = LLM(target, drafter, POLICIES.parse("fixed:k=1")).generate(PROMPTS, max_new_tokens=24)
    assert [out.stats.tokens for out in outputs] == replay.lengths
    rounds = sum(len(out.stats.rounds) for out in outputs)
    assert tau(replay.matches(SKIP.sublayers), 1) == sum(replay.lengths) / rounds


# -- the cost model ----------------------------------------------------------------------------------------------------
@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=4), st.integers(1, 9))
def test_tau_is_that_of_decoding_step_by_step(rows: list[list[bool]], k: int) -> None:
    def rounds(row: list[bool]) -> int:
        right = next((at for at, matches in enumerate(row[:k]) if not matches), min(k, len(row)))
        return 1 + rounds(row[right + 1 :]) if row else 0

    expected = sum(map(len, rows)) / sum(map(rounds, rows))
    assert tau([np.array(row) for row in rows], k) == pytest.approx(expected)
    assert 1 <= expected <= k + 1


def test_speedup_is_tokens_over_time_at_the_best_length() -> None:
    right = [np.array([True, True, False, True, True, False])]
    costs = SkipCosts(0.2, {"attention": 0.1, "mlp": 0.1}, (1.0, 1.1, 1.2, 1.3))
    assert [tau(right, k) for k in (1, 2, 3)] == [1.5, 3, 3]
    draft = costs.draft(SkipSet(3, (0, 1), (2,)))
    assert draft == pytest.approx(0.5)
    assert costs.speedup(right, draft) == (pytest.approx(3 / (2 * 0.5 + 1.2)), 2)


def test_measures_every_pass(target: Target) -> None:
    costs = measure(target, k_max=4, context=16, seconds=0.2)
    assert len(costs.verify) == 5
    assert min(costs.verify) > 0
    assert 0 < costs.draft(SkipSet(3, (0, 1, 2), (0, 1, 2))) < costs.draft(SkipSet(3, (), ()))
    assert SkipCosts.of(json.loads(json.dumps(asdict(costs)))) == costs


# -- the search --------------------------------------------------------------------------------------------------------
def test_measures_the_longest_draft_that_fits() -> None:
    """Beyond that it wrote before the cache's beginning."""
    assert len(measure(as_target(small_llama(max_position_embeddings=16)), k_max=14, seconds=0.0).verify) == 15


def test_finds_the_sublayers_that_do_nothing(idle: Target) -> None:
    seen: list[SearchProgress] = []
    found = search(idle, PROMPTS, trials=40, new_tokens=16, k_max=3, costs=COSTS, progress=seen.append)
    replay = GreedyReplay(idle, PROMPTS, 16)
    sets = [
        SkipSet(3, tuple(np.flatnonzero(bits[:3]).tolist()), tuple(np.flatnonzero(bits[3:]).tolist()))
        for bits in itertools.product((0, 1), repeat=6)
    ]
    best = max(COSTS.speedup(replay.matches(each.sublayers), COSTS.draft(each))[0] for each in sets)
    assert found.found["speedup"] == pytest.approx(best, abs=1e-4)
    assert (found.attention, found.mlp) == ((1,), (0, 2))
    assert best > 1.2
    assert [each.done for each in seen] == list(range(1, 41))
    assert seen[-1].best == max(each.speedup for each in seen) == pytest.approx(best)


@pytest.mark.parametrize("share", [0.0, 0.35])
def test_set_saves_at_least_what_is_asked(target: Target, share: float) -> None:
    """Where every sublayer counts, a search left alone skips none."""
    dear = SkipCosts(0.1, COSTS.sublayer, (1.0, 1.3))
    found = search(target, PROMPTS, trials=30, new_tokens=16, k_max=1, min_skip=share, costs=dear)
    assert found.found["speedup"] < 1
    draft = dear.draft(found)
    assert draft == pytest.approx(1.0) if share == 0 else draft <= 0.65


def test_result_tells_where_it_comes_from(idle: Target, cache_dir: Path) -> None:
    result = search(idle, PROMPTS, trials=3, new_tokens=8, k_max=3, seed=5, costs=COSTS)
    facts = result.found
    assert (facts["trials"], facts["seed"], facts["prompts"], facts["new_tokens"]) == (3, 5, 4, 8)
    assert facts["prompts_sha256"] != search(idle, PROMPTS[:3], trials=1, costs=COSTS).found["prompts_sha256"]
    assert facts["tau"] == pytest.approx(
        tau(GreedyReplay(idle, PROMPTS, 8).matches(result.sublayers), facts["k"]), abs=1e-4
    )
    assert SkipSet.find(idle) == SkipSet.even(3)
    result.save(stored_path(idle))
    assert SkipSet.find(idle) == result
    assert SkipSet.find(idle).found == json.loads(json.dumps(facts))


def test_goes_on_after_an_interruption(idle: Target, tmp_path: Path) -> None:
    journal = tmp_path / "new" / "journal"
    asked = {"new_tokens": 8, "k_max": 3, "journal": journal}

    def interrupt(progress: SearchProgress) -> None:
        if progress.done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(idle, PROMPTS, trials=12, costs=COSTS, progress=interrupt, **asked)
    seen: list[SearchProgress] = []
    dearer = SkipCosts(0.9, COSTS.sublayer, COSTS.verify)
    resumed = search(idle, PROMPTS, trials=12, costs=dearer, resume=True, progress=seen.append, **asked)
    assert [each.done for each in seen] == list(range(6, 13))
    assert resumed.found["trials"] == 12
    assert SkipCosts.of(resumed.found["costs"]) == COSTS  # all trials are judged alike
    assert search(idle, PROMPTS, trials=4, resume=True, **asked) == resumed  # nothing left to do
    assert search(idle, PROMPTS, trials=2, costs=COSTS, **asked).found["trials"] == 2  # without resume: anew


def test_a_kill_within_a_trial_loses_none_of_the_even_sets(tmp_path: Path) -> None:
    journal, wanted = tmp_path / "journal", {"layers": 3}
    study = search_module._study(0, wanted, 3, journal, resume=False)
    sets = [trial.system_attrs["fixed_params"] for trial in study.trials]
    assert len(sets) == sum(map(len, search_module.EVEN.values()))
    study.ask()  # and nobody is told what came of it
    resumed = search_module._study(0, wanted, 3, journal, resume=True)
    waiting = [
        trial.system_attrs["fixed_params"] for trial in resumed.trials if trial.state == optuna.trial.TrialState.WAITING
    ]
    assert sorted(waiting, key=str) == sorted(sets, key=str)


def test_refuses_a_journal_of_another_search(idle: Target, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    asked = {"trials": 1, "costs": COSTS, "journal": journal}
    search(idle, PROMPTS, new_tokens=8, **asked)
    with pytest.raises(OptionError, match="other new_tokens"):
        search(idle, PROMPTS, new_tokens=9, resume=True, **asked)
    journal.write_text("no journal\n")
    with pytest.raises(OptionError, match="damaged or no journal"):
        search(idle, PROMPTS, resume=True, **asked)
    with pytest.raises(OptionError, match="cannot write"):
        search(idle, PROMPTS, trials=1, costs=COSTS, journal=journal / "journal")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"trials": 0}, "trials must be at least 1, not 0"),
        ({"new_tokens": -1}, "new tokens must be at least 1, not -1"),
        ({"k_max": 0}, "k_max"),
        ({"k_max": 255}, "k_max must be at most 254 in a context of 256 tokens"),
        ({"min_skip": 1.0}, "min_skip"),
        ({"prompts": []}, "no prompts"),
        ({"prompts": [[1], []]}, "one is empty"),
        ({"prompts": [[1], [257]]}, r"token id \[257\] is outside the vocabulary of 257"),
    ],
)
def test_refuses_bad_values(target: Target, asked: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        search(target, **({"prompts": PROMPTS} | asked))


def test_refuses_models_that_cannot_skip(target: Target) -> None:
    config = GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    with pytest.raises(UnsupportedModel, match="layers run one by one"):
        search(as_target(GPT2LMHeadModel(config)), PROMPTS)
    with pytest.raises(ContextOverflow):
        search(target, [[1] * 250])


def test_says_what_is_missing(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(OptionError, match=r"paceline\[train\]"):
        search(target, PROMPTS)


# -- files -------------------------------------------------------------------------------------------------------------
def test_shipped_sets_are_whole() -> None:
    for file in SHIPPED.glob("*.json"):
        data = json.loads(file.read_text())
        sublayers = SkipSet(data["layers"], tuple(data["attention"]), tuple(data["mlp"])).sublayers
        assert all(0 <= layer < data["layers"] for layer, _ in sublayers)
        assert data["found"]["method"] == "search"


def test_refuses_a_set_with_layers_out_of_range(target: Target, tmp_path: Path) -> None:
    SkipSet(3, (7,), ()).save(tmp_path / "set.json")
    with pytest.raises(OptionError, match="layers that a model of 3 does not have"):
        SkipSet.load(tmp_path / "set.json", target)
