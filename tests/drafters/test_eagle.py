"""The drafter eagle: its cache is in step with the target, chains and trees are what its head says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from drafters.test_eagle_head import noisy
from drafters.test_early_exit import Ragged
from helpers import hf_greedy, one_thread, small_neox  # noqa: F401
from paceline.decoding.engine import Engine
from paceline.decoding.request import Request
from paceline.drafters.eagle.drafter import Eagle
from paceline.drafters.eagle.forward import EagleForward
from paceline.drafters.eagle.head import EagleHead
from paceline.drafting.base import Drafter, Row
from paceline.drafting.tree import TokenTree
from paceline.errors import CheckpointError, OptionError, UnsupportedModel
from paceline.policies.base import StoppingPolicy
from paceline.policies.fixed import Fixed
from paceline.targets import TIERS, make_target
from paceline.targets.cost_model import Costs
from paceline.targets.costs import set_costs
from paceline.targets.reference import as_target
from paceline.targets.span import Span
from paceline.targets.target import Target
from paceline.targets.whole import WholeTarget
from tiny import small_llama
from told import told

PROMPTS = [[5, 6, 7, 8], [100], [1, 2, 3, 4] * 5, [9, 9]]
NEW = 14
MODELS = {"llama": small_llama, "gpt_neox": small_neox}
KINDS = [{}, {"tree": 2, "budget": 5}, {"tree": 3, "budget": "auto"}]  # options of the drafter


def run(target: Target, drafter: Drafter, policy: Callable[[], StoppingPolicy], batch: int = 3) -> list[Request]:
    requests = [Request(prompt, limit=NEW - n, policy=policy()) for n, prompt in enumerate(PROMPTS)]
    for _ in Engine(target, drafter).run(requests, batch=batch):
        pass
    return requests


def rate(requests: list[Request]) -> float:
    return sum(r.stats.accepted for r in requests) / sum(r.stats.drafted for r in requests)


@torch.no_grad()
def features(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """`[tokens, hidden]`, from Hugging Face's own forward."""
    return model.base_model(torch.tensor([ids])).last_hidden_state[0]


class Told(Eagle):
    """Remembers what it drafted, and behind which tokens; checks the head's cache before every round."""

    def __init__(self, target: Target, model: PreTrainedModel, head: EagleHead, **options: object) -> None:
        self.model = model
        super().__init__(target, head=head, **{"extra": 0, **options})
        self.told: list[tuple[list[int], TokenTree]] = []

    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        for row in rows:
            self.check(row)
        trees = super().draft(rows)
        self.told += [(list(row.ids), tree) for row, tree in zip(rows, trees, strict=True)]
        return trees

    def check(self, row: Row) -> None:
        """It holds the target's features of all tokens but the last, as far as they do not wait."""
        cache = self.forward.cache
        read = int(cache.lengths[row.slot])
        assert read + len(row.state.waiting) == len(row.ids) - 1
        if read:
            span = Span(torch.tensor([row.ids[1 : read + 1]]), np.zeros(1, dtype=np.int64))
            fresh = self.forward.layers.new_cache(1, read)
            self.forward._run(features(self.model, row.ids[:read])[None].to(self.target.dtype), span, fresh)
            got = cache.store[:, :, row.slot, :, :read]
            torch.testing.assert_close(got, fresh.store[:, :, 0], rtol=0, atol=1e-4)


@torch.no_grad()
def path_logits(head: EagleHead, model: PreTrainedModel, context: list[int], drafted: list[int]) -> torch.Tensor:
    """The head's logits behind a context and drafted tokens: whole texts at a time, without any cache."""
    seen, ids = features(model, context[:-1]), [*context[1:], *drafted]
    for count in range(len(context) - 1, len(ids) + 1):
        guessed = head(seen[None], torch.tensor([ids[:count]]))[0]
        seen = torch.cat([seen, guessed[-1:]])
    return head.outputs(guessed[-1])


# -- drafts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("policy", [Ragged, lambda: Fixed(k=3)])
def test_output_and_cache(name: str, options: dict[str, object], policy: Callable[[], StoppingPolicy]) -> None:
    """Ragged batches, rows that come, go and move: transformers' output, and a cache in step."""
    model = MODELS[name]()
    drafter = Told(as_target(model), model, noisy(model, 2), **options)
    requests = run(drafter.target, drafter, policy)
    for request, prompt in zip(requests, PROMPTS, strict=True):
        assert request.output == hf_greedy(model, prompt, len(request.output))
    assert sum(request.stats.drafted for request in requests) > 30


@pytest.mark.parametrize("tier", list(TIERS))
@pytest.mark.parametrize("shape", [{"layers": 1}, {"layers": 2, "tokens": range(30, 200), "bias": True}])
def test_chains_are_what_the_head_says(tier: str, shape: dict[str, object]) -> None:
    """On every tier, in a batch: greedy steps over the cache give the head's own argmax over the whole text."""
    model = small_llama().float()
    drafter = Told(make_target(small_llama().float(), tier=tier), model, noisy(model, **shape))
    head = noisy(model, **shape)
    assert drafter.target.tier == tier
    run(drafter.target, drafter, lambda: Fixed(k=3))
    assert sum(tree.drafted for _, tree in drafter.told) > 50
    for context, tree in drafter.told[2::6]:
        for depth, token in enumerate(tree.tokens[1:] if len(context) > 1 else []):
            logits = path_logits(head, model, context, tree.tokens[1 : depth + 1])
            mine = logits[head.labels(torch.tensor(token))]
            assert mine >= logits.max() - (0.3 if tier == "native" else 1e-3)  # where the head is rounded


@pytest.mark.parametrize("tier", list(TIERS))
@torch.inference_mode()
def test_steps_are_the_forward_over_the_whole_text(tier: str) -> None:
    """To rounding: the root's pass, with one token and with several that wait, and the steps after it."""
    model, ids = small_llama().float(), [5, 6, 7, 8, 9, 100, 3, 200, 4]
    head, target = noisy(model, 2), make_target(small_llama().float(), tier=tier)
    seen = features(model, ids[:-1])
    want = head(seen[None], torch.tensor([ids[1:]]))[0, -1]
    following = head(torch.cat([seen, want[None]])[None], torch.tensor([[*ids[1:], 77]]))[0, -1]
    drafter = Eagle(target, head=noisy(model, 2))
    for waiting in (1, 3, len(ids) - 1):
        cache = target.new_cache(1, 20)
        drafter.start(cache)
        hidden = target.prefill(ids[:-1], cache, drafter.taps)[target.num_layers]
        request = Request(ids[:-waiting] if waiting > 1 else ids, limit=20, policy=Fixed(k=2))
        request.slot, first = 0, len(request.ids) - 1
        drafter.begin(request, {target.num_layers: hidden[:first]})
        request.ids, rest = list(ids), hidden[first:]
        request.state.waiting.add({target.num_layers: rest}, range(len(rest)))
        tree = TokenTree.root(ids[-1])
        tolerance = {"rtol": 0, "atol": 0.3 if tier == "native" else 1e-4}
        torch.testing.assert_close(drafter.step([request], [tree], 0).hidden[0], want, **tolerance)
        tree.add(77, 0, "eagle")
        torch.testing.assert_close(drafter.step([request], [tree], 1).hidden[0], following, **tolerance)


@pytest.mark.parametrize(("along", "tail", "read"), [(2, 9, 8), (8, 9, 8), (2, 3, 5), (1, 1, 2)])
@torch.inference_mode()
def test_of_a_long_prompt_the_end_is_read(along: int, tail: int, read: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once when it is first asked for, but what stands with the root; then what has come since."""
    monkeypatch.setattr("paceline.drafting.stepping.forward.ALONG", along)
    monkeypatch.setattr(EagleForward, "tail", tail)
    model, ids = small_llama().float(), [5, 6, 7, 8, 9, 100, 3, 200, 4, 11, 12]
    head, target = noisy(model, 2), as_target(small_llama().float())
    seen, prompt = features(model, ids[:-1]), len(ids) - 2
    drafter, cache = Eagle(target, head=noisy(model, 2)), target.new_cache(1, 20)
    drafter.start(cache)
    hidden = target.prefill(ids[:-1], cache, drafter.taps)[target.num_layers]
    request = Request(ids[:prompt], limit=20, policy=Fixed(k=2))
    request.slot = 0
    drafter.begin(request, {target.num_layers: hidden[: prompt - 1]})
    drafter.catch_up([request])
    assert len(request.state.waiting) == along
    for end in (prompt, len(ids)):
        request.ids = ids[:end]
        first = prompt - 1 - read
        want = head(seen[None, first : end - 1], torch.tensor([ids[first + 1 : end]]))[0, -1]
        got = drafter.step([request], [TokenTree.root(ids[end - 1])], 0).hidden[0]
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
        rest = hidden[prompt - 1 :]
        request.state.waiting.add({target.num_layers: rest}, range(len(rest)))


@pytest.mark.parametrize("tokens", [None, range(100)])
def test_trees_are_the_likeliest_paths(tokens: range | None) -> None:
    """By brute force: with as many expanded as can matter, the nodes are the best of all paths that the head knows."""
    model, width, nodes = small_llama(), 6, 6
    head = noisy(model, 1, tokens=tokens)
    drafter = Told(as_target(model), model, noisy(model, 1, tokens=tokens), tree=width, budget=nodes)
    run(drafter.target, drafter, lambda: Fixed(k=3))
    trees = [(context, tree) for context, tree in drafter.told if len(context) > 1 and tree.depth == 3]
    assert any(not tree.is_chain for _, tree in trees)
    for context, tree in trees[::4]:
        found: dict[tuple[int, ...], float] = {(): 0.0}
        for depth in range(3):
            for path in [path for path in found if len(path) == depth]:
                logps = path_logits(head, model, context, list(path)).log_softmax(-1)
                best = logps.topk(nodes)
                outputs = best.indices if head.tokens is None else head.tokens[best.indices]
                for token, logp in zip(outputs.tolist(), best.values.tolist(), strict=True):
                    found[*path, token] = found[path] + logp
            found = dict(sorted(found.items(), key=lambda item: -item[1])[: nodes + 1])
        mine = {tuple(tree.tokens[n] for n in tree.path(node)[1:]): tree.scores[node] for node in range(1, len(tree))}
        assert mine == pytest.approx({path: np.exp(logp) for path, logp in found.items() if path}, rel=1e-3)


@pytest.mark.parametrize(("price", "levels"), [(0.0, {3}), (0.04, {1, 2, 3}), (100.0, {1})])
def test_levels_that_cost_too_much(price: float, levels: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree with `budget=auto` ends where what lies behind its best candidate is not worth drafting."""
    model = small_llama()
    target = as_target(model)
    set_costs(target, Costs({1: 1.0, 64: 1.0}))
    grown: list[int] = []
    chosen = Eagle._chosen

    def noted(self: Eagle, rows: Sequence[Row], trees: Sequence[TokenTree], seconds: float) -> list[TokenTree]:
        self._seconds = price
        grown.append(self.forwards)
        return chosen(self, rows, trees, seconds)

    monkeypatch.setattr(Eagle, "_chosen", noted)
    drafter = Eagle(target, head=noisy(model), tree=2)
    drafter._seconds = price
    [*_] = Engine(target, drafter).run([Request(PROMPTS[0], limit=40, policy=Fixed(k=3))])
    assert set(grown[:-3]) == levels  # at the end there is room for less


def test_a_head_that_has_learnt() -> None:
    """Overfitted to the target's own texts, it drafts them: what it reads is what it was trained on."""
    model = small_llama()
    texts = [prompt + hf_greedy(model, prompt, NEW) for prompt in PROMPTS]
    head = EagleHead.from_target(model, 1)
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    data = [(features(model, text[:-1])[None], torch.tensor([text[1:]])) for text in texts]
    for _ in range(120):
        optimizer.zero_grad()
        for seen, following in data:
            guessed = head(seen, following)[:, :-1]
            (guessed - seen[:, 1:]).abs().mean().backward()
        optimizer.step()
    head.requires_grad_(False)
    for options in KINDS:
        drafter = Eagle(as_target(model), head=_copy(head, model), **options)
        requests = run(drafter.target, drafter, lambda: Fixed(k=2))
        for request, text in zip(requests, texts, strict=True):
            assert request.ids == text[: len(request.ids)]
        assert rate(requests) > (0.6 if not options else 0.2)


def _copy(head: EagleHead, model: PreTrainedModel) -> EagleHead:
    """A drafter takes a head over."""
    made = EagleHead.from_target(model, head.config.layers)
    made.load_state_dict(head.state_dict())
    return made


def test_sampled_drafts_of_a_trimmed_head() -> None:
    """q is zero outside the head's vocabulary, and the drafted tokens are drawn from it; trees are not drawn."""
    model = small_llama()
    for options in KINDS[:2]:
        drafter = Told(as_target(model), model, noisy(model, tokens=range(40, 200)), **options)
        request = Request(PROMPTS[0], limit=8, policy=Fixed(k=3), sampling=True, seed=0)
        [*_] = Engine(drafter.target, drafter).run([request])
        for _, tree in drafter.told:
            assert all(40 <= token < 200 for token in tree.tokens[1:])
            assert [q is None for q in tree.q[1:]] == [bool(options)] * tree.drafted
            assert all(q[:40].sum() == q[200:].sum() == 0 for q in tree.q[1:] if q is not None)


# -- options -----------------------------------------------------------------------------------------------------------


def test_options(tmp_path: Path, cache_dir: Path) -> None:
    target = as_target(small_llama())
    for options, says in (
        ({"tree": 0}, "tree must be >= 1"),
        ({"k": 0}, "k = 1 layer or more"),
        ({"tree": 2, "budget": 0}, "budget must be auto or at least 1"),
        ({"tree": 2, "budget": 10**9}, "at least 1 and at most 4096, not 1000000000"),
        ({}, "no trained EAGLE head for .*paceline train eagle"),
        ({"k": 2}, "no trained EAGLE head with layers = 2"),
    ):
        with told(OptionError, says):
            Eagle(target, **options)
    with told(CheckpointError, "no EAGLE head in"):
        Eagle(target, head=str(tmp_path))
    with told(UnsupportedModel, "layers run one by one"):
        Eagle(WholeTarget(small_llama()))


def test_finds_heads(cache_dir: Path) -> None:
    model = small_llama()
    target = as_target(model)
    for layers in (1, 2):
        noisy(model, layers).save(EagleHead.stored_path(target) / f"k{layers}")
    for k, layers in ((None, 2), (1, 1), (2, 2)):
        drafter = Eagle(target, k=k)
        assert drafter.forward.count == layers
        assert drafter.predictors[-1] == EagleHead.stored_path(target) / f"k{layers}"
    with told(OptionError, "EAGLE head given has layers = 2, not 1"):
        Eagle(target, head=str(EagleHead.stored_path(target) / "k2"), k=1)
