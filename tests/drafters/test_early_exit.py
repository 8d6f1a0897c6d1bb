"""The early-exit drafter: what it shares with the target's pass, its own cache, chains and trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from helpers import hf_greedy, one_thread, perturbed, small_neox  # noqa: F401
from paceline.decoding.engine import Engine
from paceline.decoding.request import Request
from paceline.drafters.early_exit.drafter import EarlyExit
from paceline.drafters.early_exit.head import ExitHead
from paceline.drafters.merge import Merge
from paceline.drafters.none import NoDrafter
from paceline.drafters.suffix import Suffix
from paceline.drafting.base import Drafter, Row
from paceline.drafting.tree import TokenTree, tree_span
from paceline.errors import CheckpointMismatch, OptionError, UnsupportedModel
from paceline.policies.base import StoppingPolicy
from paceline.policies.fixed import Fixed
from paceline.targets import TIERS, make_target
from paceline.targets.cache import KVCache
from paceline.targets.reference import as_target
from paceline.targets.span import Span
from paceline.targets.target import Target
from paceline.targets.whole import WholeTarget
from targets.test_families import bushy
from tiny import small_llama
from told import told

PROMPTS = [[5, 6, 7, 8], [100], [1, 2, 3, 4] * 5, [9, 9]]
NEW = 14
MODELS = {"llama": small_llama, "gpt_neox": small_neox}
KINDS = [{}, {"tree": 2, "nodes": 9}, {"tree": 3, "nodes": 4}]  # options of the drafter


def save_head(folder: Path, make: Callable[[], PreTrainedModel], noise: float = 0.0, **options: object) -> str:
    """A head over all but the first layer, or of what `options` say: without noise it is the rest of the target."""
    head = ExitHead.from_target(make(), **{"start": 1, "exit_layers": 2, **options})
    perturbed(head, noise)
    head.save(folder)
    return str(folder)


def run(
    target: Target, drafter: Drafter, policy: Callable[[], StoppingPolicy], batch: int = 3, **options: object
) -> list[Request]:
    requests = [Request(prompt, limit=NEW - n, policy=policy(), **options) for n, prompt in enumerate(PROMPTS)]
    for _ in Engine(target, drafter).run(requests, batch=batch):
        pass
    return requests


def rate(requests: list[Request]) -> float:
    return sum(r.stats.accepted for r in requests) / sum(r.stats.drafted for r in requests)


class Ragged(StoppingPolicy):
    """Drafts by turns nothing, one token, four and two, and stops by `keep` as well as by `more`."""

    limit = 4

    def __init__(self) -> None:
        self.round = -1

    def more(self, depth: int) -> bool:
        if depth == 0:
            self.round += 1
        return depth < (0, 1, 4, 3)[self.round % 4]

    def keep(self, q: object, depth: int, hidden: object = None) -> bool:
        return not (self.round % 4 == 3 and depth == 2)


class Watched(EarlyExit):
    """Checks the exit layers' cache before every round: what waits included, it is that of all tokens but the last."""

    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        for row in rows:
            self.check(row)
        return super().draft(rows)

    def check(self, row: Row) -> None:
        ids = row.ids[:-1]
        own, read = self.exit.cache, int(self.exit.cache.lengths[row.slot])
        assert read + sum(len(piece) for piece in row.state.waiting) == len(ids)
        if not ids:
            return
        span = Span(torch.tensor([ids]), np.zeros(1, dtype=np.int64))
        hidden = self.target.layers(self.target.embed(span), span, self.target.new_cache(1, len(ids)), 0, self.layers)
        fresh = self.exit.model.new_cache(1, len(ids))
        self.exit.model.layers(hidden, span, fresh, 0, self.exit.layers)
        got = own.store[:, :, row.slot, :, :read]
        torch.testing.assert_close(got, fresh.store[:, :, 0, :, :read], rtol=0, atol=3e-5)
        if row.state.waiting:
            torch.testing.assert_close(torch.cat(row.state.waiting), hidden[0, read:], rtol=0, atol=3e-5)


class Counted(Target):
    """Counts, by layer, the tokens that a target runs."""

    def __init__(self, target: Target) -> None:
        self.__dict__ = {**target.__dict__, "inner": target, "runs": np.zeros(target.num_layers, dtype=int)}

    def embed(self, span: Span) -> torch.Tensor:
        return self.inner.embed(span)

    def layers(self, hidden: torch.Tensor, span: Span, cache: KVCache, start: int, stop: int, skip: object = ()):
        self.runs[start:stop] += span.batch * span.width
        return self.inner.layers(hidden, span, cache, start, stop, skip)

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner.features(hidden)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        return self.inner.logits(features)

    def cache_shape(self) -> object:
        return self.inner.cache_shape()


# -- the pass that goes on from layer N ----------------------------------------------------------------------------


@pytest.mark.parametrize("tier", list(TIERS))
@pytest.mark.parametrize("start", [1, 2, 3])
@torch.inference_mode()
def test_pass_from_a_layer_on(tier: str, start: int) -> None:
    """Nodes run one by one or in pieces through the first layers, then all through the rest: the whole pass. To the
    last bit where the tier is exact."""
    target = make_target(small_llama(num_hidden_layers=3).float(), tier=tier)
    caches = [target.new_cache(2, 40) for _ in range(2)]
    for cache in caches:
        for row, prompt in enumerate(([1, 2, 3], [4] * 9)):
            target.prefill(prompt, cache.rows(row, row + 1))
    chain = TokenTree.root(9)
    chain.add_path([11, 12, 13], "x")
    for trees in ([chain, chain], [bushy(), chain], [bushy(), bushy()]):
        span = tree_span(trees, caches[0].lengths, target.device)
        want = target.forward(span, caches[0], (start,))
        cuts = sorted({0, 1, 2, span.width - 1, span.width})
        pieces = [span.part(a, b) for a, b in pairwise(cuts)]
        hidden = torch.cat([target.layers(target.embed(p), p, caches[1], 0, start) for p in pieces], 1)
        got = target.forward(span, caches[1], (start,), start, hidden)
        tolerance = {"rtol": 0, "atol": 0} if target.exact else {"rtol": 1e-4, "atol": 1e-4}
        for row, tree in enumerate(trees):
            mine, theirs = got.row(row, len(tree)), want.row(row, len(tree))
            torch.testing.assert_close(mine.logits, theirs.logits, **tolerance)
            torch.testing.assert_close(mine.taps, theirs.taps, **tolerance)
        for cache in caches:
            cache.commit([tree.path(len(tree) - 1) for tree in trees])


@pytest.mark.parametrize("options", KINDS)
def test_first_layers_run_once_a_token(tmp_path: Path, options: dict[str, int]) -> None:
    """Drafting and verifying runs every layer below N exactly once over every node, and the others too."""
    target = Counted(as_target(small_llama()))
    drafter = EarlyExit(target, head=save_head(tmp_path, small_llama, noise=0.3), **options)
    target.runs[:] = 0
    [*_] = Engine(target, drafter).run([request := Request(PROMPTS[0], limit=NEW, policy=Fixed(k=4))])
    nodes = len(PROMPTS[0]) - 1 + sum(1 + record.drafted for record in request.stats.rounds)
    assert 0 < request.stats.accepted < request.stats.drafted
    assert target.runs.tolist() == [nodes] * target.num_layers


# -- drafts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("policy", [Ragged, lambda: Fixed(k=3)])
def test_output_and_caches(
    tmp_path: Path, name: str, options: dict[str, int], noise: float, policy: Callable[[], StoppingPolicy]
) -> None:
    """Ragged batches, rows that come, go and move: transformers' output, and an exit cache in step."""
    make = MODELS[name]
    target = as_target(make())
    drafter = Watched(target, head=save_head(tmp_path, make, noise), **options)
    requests = run(target, drafter, policy)
    for request in requests:
        prompt = request.ids[: request.prompt_length]
        assert request.output == hf_greedy(target.model, prompt, len(request.output))
    assert sum(request.stats.accepted for request in requests) > 0
    if options == {}:
        assert (rate(requests) == 1) == (noise == 0)  # the rest of the target itself is always right


@pytest.mark.parametrize("tier", list(TIERS))
@pytest.mark.parametrize("options", KINDS)
def test_tiers(tmp_path: Path, tier: str, options: dict[str, int]) -> None:
    def make() -> PreTrainedModel:
        return small_llama().float()

    target = make_target(make(), tier=tier)
    assert target.tier == tier
    drafter = EarlyExit(target, head=save_head(tmp_path, make), **options)
    requests = run(target, drafter, Ragged)
    for request, prompt in zip(requests, PROMPTS, strict=True):
        assert request.output == hf_greedy(make(), prompt, len(request.output))
    if not options:  # the rest of the target itself; the native tier rounds it
        assert rate(requests) == 1 or (tier == "native" and rate(requests) > 0.8)


@pytest.mark.parametrize("tier", list(TIERS))
@pytest.mark.parametrize("shape", [{"exit_layers": 0}, {"exit_layers": 1, "tokens": range(30, 200), "rank": 16}])
def test_shapes_of_heads(tmp_path: Path, tier: str, shape: dict[str, object]) -> None:
    """No exit layers; a trimmed vocabulary with a low-rank matrix: drafts are what the head says in training."""

    def make() -> PreTrainedModel:
        return small_llama().float()

    folder = save_head(tmp_path, make, **shape)
    head, reference = ExitHead.load(folder), as_target(make())
    drafter = Told(make_target(make(), tier=tier), head=folder)
    run(drafter.target, drafter, lambda: Fixed(k=3))
    assert sum(tree.drafted for _, tree in drafter.told) > 50
    with torch.no_grad():
        for context, tree in drafter.told:
            tokens = tree.tokens[1:]
            said = head(_tap(reference, [*context, *tokens], head.config.start))[0, len(context) - 1 : -1]
            for logits, token in zip(said, tokens, strict=True):
                mine = logits[head.labels(torch.tensor(token))]
                assert mine >= logits.max() - (0.1 if tier == "native" else 1e-3)  # where the head is rounded


class Told(EarlyExit):
    """Remembers what it drafted, and behind which tokens."""

    def __init__(self, target: Target, **options: object) -> None:
        super().__init__(target, **options)
        self.told: list[tuple[list[int], TokenTree]] = []

    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        trees = super().draft(rows)
        self.told += [(list(row.ids), tree) for row, tree in zip(rows, trees, strict=True)]
        return trees


def _tap(target: Target, ids: list[int], layer: int) -> torch.Tensor:
    span = Span(torch.tensor([ids]), np.zeros(1, dtype=np.int64))
    return target.layers(target.embed(span), span, target.new_cache(1, len(ids)), 0, layer)


def test_sampled_drafts_of_a_trimmed_head(tmp_path: Path) -> None:
    """q is zero outside the head's vocabulary, and the drafted tokens are drawn from it."""
    target = as_target(small_llama())
    drafter = EarlyExit(target, head=save_head(tmp_path, small_llama, tokens=range(40, 90)))
    seen: list[torch.Tensor] = []

    class Looks(Fixed):
        reads_q = True

        def keep(self, q: torch.Tensor, depth: int, hidden: object = None) -> bool:
            seen.append(q)
            return True

    requests = run(target, drafter, lambda: Looks(k=3), sampling=True, seed=0, verifier="rejection")
    for q in seen:
        assert q.shape == (257,)
        assert q[40:90].sum() == pytest.approx(1)
    drafted = [t for r in requests for t, s in zip(r.output, r.stats.sources, strict=True) if s == "early-exit"]
    assert drafted
    assert set(drafted) <= set(range(40, 90))


@pytest.mark.parametrize("options", KINDS)
def test_merged_with_others(tmp_path: Path, options: dict[str, int]) -> None:
    """Its nodes come first in the merged tree; the exit cache learns of tokens that others proposed."""
    target = as_target(small_llama())
    own = Watched(target, head=save_head(tmp_path, small_llama, noise=1.0), **options)
    requests = run(target, Merge(target, drafters=[own, Suffix(target)], budget=4), Ragged)
    for request in requests:
        assert request.output == hf_greedy(target.model, request.ids[: request.prompt_length], len(request.output))
    sources = {source for request in requests for source in request.stats.sources}
    assert {"early-exit", "suffix", "target"} <= sources


def test_tree_shape(tmp_path: Path) -> None:
    """The likeliest paths, `tree` nodes of a level to draft from, `nodes` in all, no deeper than the policy wants."""
    target = as_target(small_llama())
    folder = save_head(tmp_path, small_llama)
    chain, tree = Told(target, head=folder), Told(target, head=folder, tree=3, nodes=8)
    for drafter in (chain, tree):
        run(target, drafter, lambda: Fixed(k=3), batch=1)
    trees = [made for _, made in tree.told]
    assert max(made.drafted for made in trees) == 8
    assert max(made.depth for made in trees) == 3
    assert trees[0].tokens[1] == chain.told[0][1].tokens[1]  # the best of all
    for made in trees:
        if made.depth == 3:
            assert made.children(0) == [1, 2, 3]
            assert set(made.parents) <= {-1, 0, 1, 2, 3, 4, 5, 6}
        assert len({made.tokens[node] for node in made.children(0)}) == len(made.children(0)) <= 3


@pytest.mark.parametrize("options", KINDS)
def test_match_gives_the_seeds_own_sample(tmp_path: Path, options: dict[str, int]) -> None:
    """Chains and trees: whatever is drafted, a seed gives the same tokens."""
    target = as_target(small_llama())
    drafter = EarlyExit(target, head=save_head(tmp_path, small_llama, noise=0.1), **options)
    how = {"sampling": True, "seed": 5, "verifier": "match"}
    want = run(target, NoDrafter(target), lambda: Fixed(k=0), **how)
    got = run(target, drafter, Ragged, **how)
    assert [r.output for r in got] == [r.output for r in want]
    assert sum(r.stats.accepted for r in got) > 0 or not options  # two draws of a flat distribution seldom agree


def test_hidden_states_for_policies(tmp_path: Path) -> None:
    """Policies that read them see the head's last hidden state, which the logits come of."""
    target = as_target(small_llama())
    folder = save_head(tmp_path, small_llama, exit_layers=1)
    for options in KINDS:
        drafter = EarlyExit(target, head=folder, **options)
        seen: list[torch.Tensor] = []

        class Looks(Fixed):
            reads_q = reads_hidden = True

            def keep(self, q: torch.Tensor, depth: int, hidden: torch.Tensor) -> bool:
                torch.testing.assert_close(drafter.exit.logits(hidden).float().softmax(-1), q)  # noqa: B023
                seen.append(hidden)  # noqa: B023
                return True

        run(target, drafter, lambda: Looks(k=3))
        assert {h.shape for h in seen} == {(drafter.hidden_width,)}


# -- what can be wrong ---------------------------------------------------------------------------------------------


def test_heads_are_found(tmp_path: Path, cache_dir: Path) -> None:
    target = as_target(small_llama())
    with told(OptionError, "no trained exit head for llama.*early-exit:head=FOLDER"):
        EarlyExit(target)
    save_head(ExitHead.stored_path(target), small_llama)
    assert ExitHead.stored_path(target).is_relative_to(cache_dir)
    assert EarlyExit(target).layers == 1
    with told(CheckpointMismatch):  # of the same name
        EarlyExit(as_target(small_llama(seed=3)))


def test_refused(tmp_path: Path) -> None:
    model = small_llama()
    with told(UnsupportedModel, "layers run one by one"):
        EarlyExit(WholeTarget(model))
    with told(UnsupportedModel, "layers one by one"):
        span = Span(torch.tensor([[1]]), np.zeros(1, dtype=np.int64))
        target = WholeTarget(model)
        target.forward(span, target.new_cache(1, 4), start=1, hidden=torch.zeros(1, 1, 32))
    for options, says in (({"tree": 0}, "tree must be"), ({"nodes": 0}, "nodes must be")):
        with told(OptionError, says):
            EarlyExit(as_target(model), head=str(tmp_path), **options)
