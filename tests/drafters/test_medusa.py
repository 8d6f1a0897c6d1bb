"""The Medusa drafter: which hidden state it drafts from, chains and trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from transformers import PreTrainedModel

from helpers import hf_greedy, one_thread, small_neox  # noqa: F401
from paceline.decoding.engine import Engine
from paceline.decoding.request import Request
from paceline.decoding.sampling import SamplingParams
from paceline.drafters.medusa.drafter import Medusa
from paceline.drafters.medusa.head import VOCABULARIES, MedusaHead
from paceline.drafters.merge import Merge
from paceline.drafters.none import NoDrafter
from paceline.drafters.suffix import Suffix
from paceline.drafting.base import Drafter, Row
from paceline.drafting.likeliest_paths import Choice, likeliest
from paceline.drafting.tree import TokenTree
from paceline.errors import CheckpointError, OptionError, UnsupportedModel
from paceline.policies.base import StoppingPolicy
from paceline.policies.fixed import Fixed
from paceline.targets import make_target
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
KINDS = [{}, {"tree": "static", "budget": 9}, {"tree": "dynamic", "budget": 9}, {"tree": "dynamic"}]
ACCURACIES = [[0.5, 0.2, 0.1], [0.3, 0.2, 0.1], [0.2, 0.1, 0.1]]


@torch.no_grad()
def feature(target: Target, ids: list[int]) -> torch.Tensor:
    """`[tokens, hidden]` of a whole text."""
    span = Span(torch.tensor([ids]), np.zeros(1, dtype=np.int64))
    cache = target.new_cache(1, len(ids))
    return target.features(target.layers(target.embed(span), span, cache, 0, target.num_layers))[0]


@torch.no_grad()
def noisy(model: PreTrainedModel, noise: float = 0.05, **options: object) -> MedusaHead:
    head = MedusaHead.from_target(model, **{"heads": 3, "layers": 2, **options})
    head.config = replace(head.config, accuracies=ACCURACIES)
    generator = torch.Generator().manual_seed(2)
    for weight in head.parameters():
        weight += noise * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return head


@torch.no_grad()
def knowing(model: PreTrainedModel, prompt: list[int], heads: int = 3) -> MedusaHead:
    """Heads that know what greedy decoding makes of a prompt: vocabulary layers through all its features."""
    ids = prompt + hf_greedy(model, prompt, NEW + heads + 1)
    seen = feature(as_target(model), ids)[: len(prompt) + NEW]
    head = MedusaHead.from_target(model, heads=heads, vocabulary="own")
    head.config = replace(head.config, accuracies=[[0.9, 0.05, 0.02]] * heads)
    for i in range(heads):
        sure = 20 * torch.nn.functional.one_hot(torch.tensor(ids[2 + i :][: len(seen)]), 257).to(seen.dtype)
        head.matrix[i] = torch.linalg.lstsq(seen, sure, driver="gelsd").solution.T
    return head


def run(
    target: Target, drafter: Drafter, policy: Callable[[], StoppingPolicy], batch: int = 3, **options: object
) -> list[Request]:
    requests = [Request(prompt, limit=NEW - n, policy=policy(), **options) for n, prompt in enumerate(PROMPTS)]
    for _ in Engine(target, drafter).run(requests, batch=batch):
        pass
    return requests


class Told(Medusa):
    """Keeps what it drafted, with what it drafted from."""

    def __init__(self, target: Target, **options: object) -> None:
        super().__init__(target, **options)
        self.told: list[tuple[list[int], TokenTree]] = []

    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        trees = super().draft(rows)
        self.told += [(list(row.ids), tree) for row, tree in zip(rows, trees, strict=True)]
        return trees


class Ragged(StoppingPolicy):
    """Wants by turns nothing, one token, and more than there are heads; sometimes only until it sees what comes."""

    limit = 4

    def __init__(self) -> None:
        self.round = -1

    def more(self, depth: int) -> bool:
        if depth == 0:
            self.round += 1
        return depth < (0, 1, 4, 3)[self.round % 4]

    def keep(self, q: object, depth: int, hidden: object = None) -> bool:
        return not (self.round % 4 == 3 and depth == 2)


# -- what the heads read -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_drafts_from_the_feature_before_the_root(name: str, vocabulary: str) -> None:
    """In every round of every request, by turns joining, leaving and changing rows."""
    model, tokens = MODELS[name](), None if vocabulary == "shared" else range(0, 256, 2)
    head = noisy(model, vocabulary=vocabulary, tokens=tokens)
    target = as_target(model)
    drafter = Told(target, head=head)
    for request in run(target, drafter, Ragged):
        assert request.output == hf_greedy(model, request.ids[: request.prompt_length], len(request.output))
    drafted = 0
    for ids, tree in drafter.told:
        if tree.drafted and len(ids) > 1:
            with torch.no_grad():
                best = head(feature(target, ids[:-1])[-1]).argmax(-1)[: tree.drafted]
            assert tree.tokens[1:] == (best if head.tokens is None else head.tokens[best]).tolist()
            drafted += tree.drafted
    assert drafted > 10


@pytest.mark.parametrize("options", [{}, {"tree": "dynamic", "budget": 3}, {"tree": "static", "budget": 8}])
def test_heads_that_know(options: dict[str, object]) -> None:
    """Head i says what comes i places behind the root: then all drafts are right."""
    model, prompt = small_llama(), [5, 6, 7, 8]
    target = as_target(model)
    request = Request(prompt, limit=NEW, policy=Fixed(k=3))
    for _ in Engine(target, Medusa(target, head=knowing(model, prompt), **options)).run([request]):
        pass
    assert request.output == hf_greedy(model, prompt, NEW)
    assert [record.emitted for record in request.stats.rounds] == [4, 4, 4, 2]


def rounded(weight: torch.Tensor) -> torch.Tensor:
    q8 = GGMLQuantizationType.Q8_0
    return torch.from_numpy(dequantize(quantize(weight.detach().numpy(), q8), q8))


@pytest.mark.parametrize("tier", ["torch", "native"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("tokens", [None, range(0, 256, 2)])
def test_the_fast_forward(tier: str, vocabulary: str, tokens: range | None) -> None:
    """Packed weights compute what the module does; on the native tier, with weights and inputs rounded."""
    model = small_llama().float()
    head = noisy(model, vocabulary=vocabulary, tokens=tokens)
    if tier == "native":
        head.weight.data[0] = rounded(head.weight[0])
        if vocabulary != "target" or tokens is not None:  # else the target's own layer, which is not rounded
            head.matrix.data = rounded(head.matrix)
    hidden = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        features = as_target(small_llama().float()).features(hidden)
        states, logits = head.states(features), head(features)
        drafter = Medusa(make_target(small_llama().float(), tier=tier), head=head)
        got = drafter.forward(hidden)
    near = 0.1 if tier == "native" else 1e-4
    torch.testing.assert_close(got.states, states, rtol=near, atol=near)
    torch.testing.assert_close(got.logits, logits, rtol=near, atol=near)


# -- chains and trees ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_greedy(name: str, options: dict[str, object]) -> None:
    model = MODELS[name]()
    target = as_target(model)
    set_costs(target, Costs({1: 1.0, 32: 1.1}))
    for request in run(target, Medusa(target, head=noisy(model), **options), Ragged):
        assert request.output == hf_greedy(model, request.ids[: request.prompt_length], len(request.output))
        depths = {record.depth for record in request.stats.rounds}
        assert max(depths) == 3 if options.get("tree") != "dynamic" else 0 < max(depths) <= 3  # as there are heads


@pytest.mark.parametrize("options", KINDS)
def test_match_gives_the_seeds_own_sample(options: dict[str, object]) -> None:
    model = small_llama()
    target = as_target(model)
    set_costs(target, Costs({1: 1.0, 32: 1.1}))
    processors = SamplingParams(temperature=0.1).processors(0, (), target.device)  # sure enough to be foreseen
    how = {"sampling": True, "seed": 5, "verifier": "match", "processors": processors}
    want = run(target, NoDrafter(target), lambda: Fixed(k=0), **how)
    got = run(target, Medusa(target, head=noisy(model), **options), Ragged, **how)
    assert [r.output for r in got] == [r.output for r in want]
    assert sum(r.stats.accepted for r in got) > 2


def test_tree_shapes() -> None:
    """Static: by the accuracies, every round alike. Dynamic: by what the heads say."""
    model = small_llama()
    head, target = noisy(model), as_target(model)
    static, dynamic = (Told(target, head=noisy(model), tree=tree, budget=7) for tree in ("static", "dynamic"))
    for drafter in (static, dynamic):
        run(target, drafter, lambda: Fixed(k=2), batch=1)
    ranked = likeliest([[Choice(a, rank) for rank, a in enumerate(ranks)] for ranks in ACCURACIES[:2]], 7)
    full = 0
    for (ids, tree), (_, other) in zip(static.told, dynamic.told, strict=False):
        if tree.depth < 2 or len(ids) == 1:
            continue
        with torch.no_grad():
            logits = head(feature(target, ids[:-1])[-1])
        order = logits.argsort(-1, descending=True)
        assert tree.tokens[1:] == [int(order[node.depth - 1, node.token]) for node in ranked]
        assert tree.parents[1:] == [node.parent for node in ranked]
        assert tree.scores[1:] == [node.score for node in ranked]
        if other.tokens[0] == tree.tokens[0] and other.depth:
            chances = logits.softmax(-1)
            for node in range(1, len(other)):
                path = other.path(node)[1:]
                want = np.prod([float(chances[depth, other.tokens[at]]) for depth, at in enumerate(path)])
                assert other.scores[node] == pytest.approx(want)
            full += other.drafted == 7
    assert full > 3


def test_auto_budget_follows_the_costs() -> None:
    """Where width is free, trees are large; where a node costs a pass, none is worth it."""
    model, drafted = small_llama(), []
    for per_node in (0.0, 1.0):
        target = as_target(model)
        set_costs(target, Costs({1: 1.0, 32: 1.0 + 31 * per_node}))
        drafter = Medusa(target, head=knowing(model, PROMPTS[0]), tree="dynamic")
        request = Request(PROMPTS[0], limit=NEW, policy=Fixed(k=3))
        for _ in Engine(target, drafter).run([request]):
            pass
        assert request.output == hf_greedy(model, PROMPTS[0], NEW)
        drafted.append(request.stats.drafted)
    assert drafted[0] > 20
    assert drafted[1] == 0


@pytest.mark.parametrize("options", KINDS)
def test_merged_with_others(options: dict[str, object]) -> None:
    model = small_llama()
    target = as_target(model)
    set_costs(target, Costs({1: 1.0, 32: 1.1}))
    drafter = Merge(target, drafters=[Medusa(target, head=noisy(model), **options), Suffix(target)], budget=4)
    requests = run(target, drafter, Ragged)
    for request in requests:
        assert request.output == hf_greedy(model, request.ids[: request.prompt_length], len(request.output))


def test_nothing_is_computed_where_nothing_is_wanted() -> None:
    model = small_llama()
    target = as_target(model)
    for options in KINDS[:3]:
        drafter = Medusa(target, head=noisy(model), **options)
        drafter.forward = None  # which would fail
        run(target, drafter, lambda: Fixed(k=0))


def test_hidden_states_for_policies() -> None:
    """Policies that read them see what the logits come of."""
    model = small_llama()
    target, head = as_target(model), noisy(model)
    for options in KINDS[:3]:
        drafter, seen = Medusa(target, head=noisy(model), **options), []

        class Looks(Fixed):
            reads_q = reads_hidden = True

            def keep(self, q: torch.Tensor, depth: int, hidden: torch.Tensor) -> bool:
                torch.testing.assert_close(head.outputs(hidden.expand(3, -1))[0].float().softmax(-1), q)
                seen.append(hidden)  # noqa: B023
                return True

        run(target, drafter, lambda: Looks(k=3))
        assert {hidden.shape for hidden in seen} == {(drafter.hidden_width,)}


# -- what can be wrong ---------------------------------------------------------------------------------------------


def test_heads_are_found(cache_dir: Path) -> None:
    model = small_llama()
    target = as_target(model)
    with told(OptionError, "medusa: there is no trained Medusa head for llama.*medusa:head=FOLDER"):
        Medusa(target)
    for layers in (1, 2):
        noisy(model, layers=layers).save(MedusaHead.stored_path(target) / f"k{layers}")
    assert MedusaHead.stored_path(target).is_relative_to(cache_dir)
    for k in (1, 2, None):
        assert Medusa(target, k=k).folder == MedusaHead.stored_path(target) / f"k{k or 2}"
    with told(OptionError, "no trained Medusa head with layers = 3"):
        Medusa(target, k=3)


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_a_damaged_head_hides_no_other(text: str, cache_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = small_llama()
    target = as_target(model)
    stored = MedusaHead.stored_path(target)
    for name in ("k1", "k2"):
        noisy(model, layers=1).save(stored / name)
    (stored / "k2" / "medusa.json").write_text(text)
    assert Medusa(target).folder == stored / "k1"
    assert "does not describe a head" in caplog.text


def test_refused(tmp_path: Path) -> None:
    model = small_llama()
    target = as_target(model)
    MedusaHead.from_target(model).save(tmp_path)
    with told(UnsupportedModel, "medusa needs a model whose layers run one by one"):
        Medusa(WholeTarget(model), head=str(tmp_path))
    with told(CheckpointError, "no Medusa head in"):
        Medusa(target, head=str(tmp_path / "nowhere"))
    for options, says in (
        ({"tree": "bush"}, "chain, static, dynamic"),
        ({"tree": "static"}, "nobody measured"),
        ({"k": 0}, "k = 1 block or more, not 0"),
        ({"k": 2}, "Medusa head given has layers = 1, not 2"),
        ({"budget": 0}, "at least 1"),
    ):
        with told(OptionError, says):
            Medusa(target, head=str(tmp_path), **options)
