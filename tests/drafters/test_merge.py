"""Merged drafters: whose tokens are in the tree, in which order, and what each drafter is told."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

import paceline
from helpers import hf_greedy, one_thread  # noqa: F401
from paceline.api import LLM
from paceline.drafters.eagle.drafter import Eagle
from paceline.drafters.eagle.head import EagleHead
from paceline.drafters.layer_skip.drafter import LayerSkip
from paceline.drafters.lookahead import Lookahead
from paceline.drafters.merge import Merge
from paceline.drafters.suffix import Suffix
from paceline.drafting.base import Drafter, Row
from paceline.drafting.pool import Pool
from paceline.drafting.tree import TokenTree
from paceline.drafting.tree_drafter import TreeDrafter
from paceline.errors import OptionError
from paceline.policies import POLICIES
from paceline.policies.fixed import Fixed
from paceline.policies.pace import Pace
from paceline.profiling import rounds
from paceline.targets import as_target
from paceline.targets.cost_model import Costs
from paceline.targets.costs import set_costs
from paceline.targets.target import PassOutput
from tiny import byte_tokenizer, small_llama

TARGET = SimpleNamespace(device=torch.device("cpu"), vocab_size=10, num_layers=2)
Q = torch.full((10,), 0.1)


class Paths(TreeDrafter):
    """Proposes the same scored paths again and again."""

    def __init__(self, source: str, paths: dict[tuple[int, ...], float]) -> None:
        super().__init__(TARGET, 9)
        self.source, self.paths, self.told = source, paths, []

    def propose(self, row: Row, memory: object, depth: int, min_score: float) -> TokenTree:
        tree, places = TokenTree.root(row.ids[-1]), {(): 0}
        for path, score in self.paths.items():
            places[path] = tree.add(path[-1], places[path[:-1]], self.source, score=score)
        return tree

    def learn(self, row: Row, memory: object, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        self.told.append((tree.tokens, path))


class Sampled(Drafter):
    """A tree of sampled nodes: (token, parent), ..."""

    def __init__(self, nodes: Sequence[tuple[int, int]], replacement: bool = True) -> None:
        super().__init__(TARGET)
        self.nodes, self.replacement, self.told = nodes, replacement, []

    def begin(self, row: Row, hidden: object) -> None:
        row.state = "own"

    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        tree = TokenTree.root(rows[0].ids[-1])
        tree.replacement = self.replacement
        for token, parent in self.nodes:
            tree.add(token, parent, "sampled", Q)
        return [tree]

    def observe(self, row: Row, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        self.told.append((row.state, tree.tokens, path, out.logits[:, 0].tolist()))


def row() -> SimpleNamespace:
    return SimpleNamespace(slot=0, ids=[9, 0], policy=Fixed(k=4), state=None, sampling=True, room=9)


def draft(parts: Sequence[Drafter], budget: int = 9) -> tuple[Merge, SimpleNamespace, TokenTree]:
    merge, made = Merge(TARGET, drafters=parts, budget=budget), row()
    merge.begin(made, {})
    [tree] = merge.draft([made])
    assert tree.drafted <= merge.max_nodes(4)
    return merge, made, tree


def nodes(tree: TokenTree) -> list[tuple[tuple[int, ...], str]]:
    return [(tuple(tree.tokens[n] for n in tree.path(node)[1:]), tree.sources[node]) for node in range(1, len(tree))]


A = {(1,): 0.5, (1, 2): 0.4, (3,): 0.1}
B = {(1,): 0.5, (4,): 0.3, (4, 5): 0.2, (1, 2): 0.45, (3,): 0.05}


def test_the_best_of_all_share_the_budget() -> None:
    """What two propose stands once, in the name of the more confident, or else of the first."""
    found = [((1,), "a"), ((1, 2), "b"), ((4,), "b"), ((4, 5), "b"), ((3,), "a")]
    for budget in (1, 3, 5):
        assert nodes(draft([Paths("a", A), Paths("b", B)], budget)[2]) == found[:budget]
    assert nodes(draft([Paths("b", B), Paths("a", A)], 1)[2]) == [((1,), "b")]


def test_all_are_told_of_the_round() -> None:
    first, second = Paths("a", A), Paths("b", B)
    merge, made, tree = draft([first, second], 3)
    merge.observe(made, tree, [0, 1], PassOutput(torch.zeros(len(tree), 1), {}))
    assert first.told == second.told == [([0, 1, 2, 4], [0, 1])]


def test_sampled_tokens_come_first_and_stay() -> None:
    """Though they repeat a token; deterministic ones come behind, or go on from an equal one."""
    sampled = Sampled([(1, 0), (1, 0), (6, 1)], replacement=False)
    _, _, tree = draft([Paths("a", A), sampled], 3)
    assert tree.tokens == [0, 1, 1, 6, 2, 3]
    assert tree.parents == [-1, 0, 0, 1, 1, 0]
    assert [q is None for q in tree.q] == [True, False, False, False, True, True]
    assert not tree.replacement


@pytest.mark.parametrize(
    ("path", "tokens", "own", "logits"),
    [
        ([0, 2], [0, 1, 1, 6], [0, 2], [0, 1, 2, 3]),
        ([0, 1, 4], [0, 1, 1, 6, 2], [0, 1, 4], [0, 1, 2, 3, 4]),  # a token of the other drafter's
        ([0, 5], [0, 1, 1, 6, 3], [0, 4], [0, 1, 2, 3, 5]),
    ],
)
def test_whole_trees_are_told_of_all_accepted_tokens(
    path: list[int], tokens: list[int], own: list[int], logits: list[float]
) -> None:
    sampled = Sampled([(1, 0), (1, 0), (6, 1)], replacement=False)
    merge, made, tree = draft([Paths("a", A), sampled], 3)
    merge.observe(made, tree, path, PassOutput(torch.arange(6.0)[:, None], {}))
    assert sampled.told == [("own", tokens, own, logits)]


@pytest.mark.parametrize(("path", "own"), [([0, 2], 1), ([0, 1, 4], 1), ([0, 5], 0)])
def test_policies_of_whole_trees_are_told_of_their_own_tokens(
    path: list[int], own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled, told = Sampled([(1, 0), (1, 0), (6, 1)], replacement=False), list[tuple[int, int]]()
    merge, made, tree = draft([Paths("a", A), sampled], 3)
    monkeypatch.setattr(Fixed, "observe", lambda self, drafted, accepted: told.append((drafted, accepted)))
    merge.observe(made, tree, path, PassOutput(torch.arange(6.0)[:, None], {}))
    assert told == [(2, own)]


class Scored(Drafter):
    """A tree of scored nodes, as a head's: (token, parent), ..."""

    competes = True

    def __init__(self, nodes: Sequence[tuple[int, int]]) -> None:
        super().__init__(TARGET)
        self.nodes = nodes

    def begin(self, row: Row, hidden: object) -> None:
        row.state = SimpleNamespace()

    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        tree = TokenTree.root(rows[0].ids[-1])
        for token, parent in self.nodes:
            tree.add(token, parent, "scored", score=0.1 ** len(tree))
        return [tree]


@pytest.mark.parametrize(
    ("budget", "path", "outcome"),
    [
        (9, [0, 1, 2], (3, 1)),  # the second token is the other drafter's
        (9, [0, 3], (3, 0)),
        (3, [0, 1, 2], (1, 1)),  # the rest of its own was not verified
    ],
)
def test_policies_of_heads_are_told_of_their_own_tokens(
    budget: int, path: list[int], outcome: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[tuple[int, int]]()
    merge, made, tree = draft([Paths("a", A), Scored([(1, 0), (6, 1), (7, 2)])], budget)
    assert nodes(tree)[:3] == [((1,), "a"), ((1, 2), "a"), ((3,), "a")]
    monkeypatch.setattr(Fixed, "observe", lambda self, drafted, accepted: told.append((drafted, accepted)))
    merge.observe(made, tree, path, PassOutput(torch.zeros(len(tree), 1), {}))
    assert told == [outcome]


def test_trees_that_do_not_go_together() -> None:
    other = Sampled([(1, 0)])
    assert draft([other, Sampled([(2, 0)])])[2].tokens == [0, 1, 2]
    for parts in ([other, Sampled([(2, 0)], False)], [Sampled([(2, 0)], False), other]):
        with pytest.raises(OptionError, match="without replacement"):
            draft(parts)


@pytest.mark.parametrize("names", ["", "suffix", "suffix|", "suffix|nonsense", "suffix|trigram;nodes=3"])
def test_bad_options(names: str) -> None:
    with pytest.raises(OptionError):
        Merge(as_target(small_llama()), drafters=names)


def test_merges_are_no_parts_of_merges() -> None:
    target = as_target(small_llama())
    with pytest.raises(OptionError, match="cannot be parts of one"):
        Merge(target, drafters="auto|suffix")


def test_options_of_parts() -> None:
    merge = Merge(as_target(small_llama()), drafters="suffix;shortest=3|lookahead;level=3;budget=9", budget=4)
    assert merge.parts[0].lookup.shortest == 3
    assert isinstance(merge.parts[1], Lookahead)
    assert merge.parts[1].level == 3


@pytest.mark.parametrize(
    "method",
    ["merge:drafters=suffix|trigram|recycling:budget=12", "merge:drafters=lookahead;level=3;budget=16|prompt-lookup"],
)
def test_generates_what_plain_decoding_does(method: str) -> None:
    """Several prompts at once, more than there are rows."""
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [100], [1, 2, 3, 4] * 9, [42, 43]]
    plain = paceline.load(small_llama(), tokenizer=byte_tokenizer(), drafter="none")
    truth = [output.tokens for output in plain.generate(prompts, max_new_tokens=60, eos=())]
    for batch in (1, 3):
        outputs = plain.method(method).generate(prompts, batch=batch, max_new_tokens=60, eos=())
        assert [output.tokens for output in outputs] == truth
    if "recycling" in method:
        assert len({source for output in outputs for source in output.stats.sources}) > 2


def test_heads_have_room_for_all_that_they_draft_from() -> None:
    """In a cache of their own, which is as large as the target's: a small budget is no limit to it."""
    model = small_llama()
    target = as_target(model)
    eagle = Eagle(target, head=EagleHead.from_target(small_llama()), tree=4, budget=200)
    merge = Merge(target, drafters=[eagle, Suffix(target, budget=4)], budget=4)
    output = LLM(target, merge, POLICIES.parse("fixed:k=8")).generate([1, 2, 3], max_new_tokens=12, eos=())
    assert output.tokens == hf_greedy(model, [1, 2, 3], 12)


def test_policies_of_heads_are_told_of_rounds_in_which_they_were_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    target = as_target(small_llama())
    eagle = Eagle(target, head=EagleHead.from_target(small_llama()), tree=2)
    merge = Merge(target, drafters=[Suffix(target), eagle])
    told, rounds = list[int](), 0

    def asks(pool: Pool, number: int, seconds: float, random: object) -> bool:
        nonlocal rounds
        rounds += number
        return number == 0 or rounds % 3 == 0

    def observe(self: Fixed, drafted: int, accepted: int) -> None:
        told.append(rounds)

    monkeypatch.setattr(Pool, "asks", asks)
    llm = LLM(target, merge, POLICIES.parse("fixed:k=3"))
    [request] = llm.requests([[1, 2, 3]], max_new_tokens=30, eos=())
    steps = llm.engine.run([request])
    next(steps)
    monkeypatch.setattr(type(request.state.views[1].policy), "observe", observe)
    for _ in steps:
        pass
    own = [told[at] for at in range(1, len(told)) if told[at] == told[at - 1]]  # the request's own is told each round
    assert own
    assert all(number % 3 == 0 for number in own)


@pytest.mark.parametrize("policy", ["pace", "beta-ts:cost=auto", "cali-ts:cost=auto"])
def test_a_part_that_runs_a_model_does_not_draft_for_free(policy: str) -> None:
    """Its policy is told what its own rounds cost, and hands on to the next request what it has learned."""
    target = as_target(small_llama())
    part = LayerSkip(target)
    set_costs(target, Costs({1: 1.0, 2: 1.1}))
    set_costs(part, Costs({0: 1.0, 1: 1.6}))
    llm = LLM(target, Merge(target, drafters=[part, Suffix(target)]), POLICIES.parse(policy))
    seen = []
    for _ in range(2):
        [request] = llm.requests([[5, 6, 7] * 9], max_new_tokens=24)
        engine = llm.engine
        engine.add(request)
        engine.step()
        seen.append(own := request.state.views[0].policy)
        assert own.long_run.cost(1) == pytest.approx(1.6)
        assert request.policy.long_run.cost(1) < 1.6
        while not engine.idle:
            engine.step()
    if policy == "pace":
        assert rounds._before[part][True][Pace] is seen[-1]


def test_parts_are_measured_before_they_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Drafter] = []

    def measured(drafter: Drafter) -> Costs:
        asked.append(drafter)
        return Costs({0: 1.0, 1: 1.6})

    monkeypatch.setattr(rounds, "_round_seconds", measured)
    target = as_target(small_llama())
    part = LayerSkip(target)
    LLM(target, Merge(target, drafters=[part, Suffix(target)]), POLICIES.parse("pace")).requests(
        [[5]], max_new_tokens=4
    )
    assert part in asked
