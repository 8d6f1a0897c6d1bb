"""Chi-square tests: whatever drafts and verifies, the first tokens of the output are distributed as the target's own.

First the verify functions, over a target and a drafter that are tables; then the whole engine, over a tiny model.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from copy import deepcopy

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, PrefixConstrainedLogitsProcessor

import predictor_files
from helpers import SIGNIFICANCE, Oracle, p_value, perturbed
from mtp_models import MtpModel, random_layer
from paceline.decoding.engine import Engine
from paceline.decoding.prefixes import PrefixStore
from paceline.decoding.request import Request
from paceline.decoding.sampling import SamplingParams
from paceline.decoding.verify import Outcome, chain_rejection, sample_match, tree_rejection
from paceline.drafters import DRAFTERS
from paceline.drafters.dflash.drafter import DFlash
from paceline.drafters.dflash.head import DFlashHead
from paceline.drafters.draft_model import DraftModel
from paceline.drafters.eagle.drafter import Eagle
from paceline.drafters.eagle.eagle3_head import Eagle3Head
from paceline.drafters.eagle.head import EagleHead
from paceline.drafters.early_exit.drafter import EarlyExit
from paceline.drafters.early_exit.head import ExitHead
from paceline.drafters.layer_skip.drafter import LayerSkip
from paceline.drafters.lookahead import Lookahead
from paceline.drafters.medusa.drafter import Medusa
from paceline.drafters.medusa.head import MedusaHead
from paceline.drafters.merge import Merge
from paceline.drafters.mtp.drafter import Mtp
from paceline.drafters.recycling import Recycling
from paceline.drafters.rest.datastore import Datastore
from paceline.drafters.rest.drafter import Rest
from paceline.drafting.autoregressive import AutoregressiveDrafter
from paceline.drafting.base import Drafter
from paceline.drafting.tree import TokenTree
from paceline.policies import POLICIES
from paceline.policies.base import StoppingPolicy
from paceline.targets.reference import BlockTarget
from tiny import pair_tokenizer, small_llama, with_tokens

VOCAB = 5
LENGTH = 3  # of the output whose joint distribution is tested
Draft = Callable[[list[int], random.Random], TokenTree]
Verify = Callable[[TokenTree, torch.Tensor, random.Random], Outcome]

# Next-token distributions given the last two tokens; the drafter's resemble the target's a little.
_rng = np.random.default_rng(0)
P = _rng.dirichlet(np.full(VOCAB, 0.7), size=(VOCAB, VOCAB))
Q = 0.2 * P + 0.8 * _rng.dirichlet(np.full(VOCAB, 0.7), size=(VOCAB, VOCAB))
P_TENSOR, Q_TENSOR = torch.tensor(P), torch.tensor(Q)
START = [0, 1]


def context(ids: list[int], tree: TokenTree, node: int) -> tuple[int, int]:
    last = (ids[:-1] + [tree.tokens[n] for n in tree.path(node)])[-2:]
    return last[0], last[1]


def pick(weights: Sequence[float], rng: random.Random) -> int:
    return rng.choices(range(VOCAB), weights)[0]


# -- drafts --------------------------------------------------------------------------------------------------------


def sampled_chain(ids: list[int], rng: random.Random, keep_token: Callable[[int], bool] = lambda token: True):
    """Up to 3 tokens; it stops before one whose distribution is too flat, as a policy may."""
    tree, node = TokenTree.root(ids[-1]), 0
    while node < 3 and Q[at := context(ids, tree, node)].max() > 0.4:
        token = pick(Q[at], rng)
        if not keep_token(token):
            break
        node = tree.add(token, node, "draft", Q_TENSOR[at])
    return tree


def argmax_chain(ids: list[int], rng: random.Random) -> TokenTree:
    tree, node = TokenTree.root(ids[-1]), 0
    while node < 3:
        node = tree.add(int(Q[context(ids, tree, node)].argmax()), node, "draft")
    return tree


def sampled_tree(ids: list[int], rng: random.Random, replacement: bool = True) -> TokenTree:
    """Three children of the root, two of each of these, drawn with or without replacement."""
    tree = TokenTree.root(ids[-1])
    tree.replacement = replacement
    for node, children in [(0, 3), (1, 2), (2, 2), (3, 2)]:
        at = context(ids, tree, node)
        weights = Q[at].copy()
        for _ in range(children):
            token = pick(weights, rng)
            tree.add(token, node, "draft", Q_TENSOR[at])
            if not replacement:
                weights[token] = 0
    return tree


def tree_without_replacement(ids: list[int], rng: random.Random) -> TokenTree:
    return sampled_tree(ids, rng, replacement=False)


def top_tree(ids: list[int], rng: random.Random) -> TokenTree:
    """The drafter's two best tokens at each node: a fixed set of candidates."""
    tree = TokenTree.root(ids[-1])
    for node in (0, 1, 2):
        for token in np.argsort(-Q[context(ids, tree, node)])[:2]:
            tree.add(int(token), node, "draft")
    return tree


def ngram(ids: list[int]) -> list[int]:
    """A path that depends on the past alone, such as n-gram drafters copy."""
    return [(3 * ids[-1] + ids[-2]) % VOCAB, (ids[-1] + 2) % VOCAB]


def sampled_then_ngram(ids: list[int], rng: random.Random) -> TokenTree:
    tree = sampled_tree(ids, rng)
    tree.add_path(ngram(ids), "n-gram")
    return tree


def without_replacement_then_ngram(ids: list[int], rng: random.Random) -> TokenTree:
    tree = sampled_tree(ids, rng, replacement=False)
    tree.add_path(ngram(ids), "n-gram")
    return tree


def ngram_then_sampled(ids: list[int], rng: random.Random) -> TokenTree:
    """Sampled siblings come behind an n-gram one, which they may repeat; each goes on with one sampled child."""
    tree = TokenTree.root(ids[-1])
    tree.add_path(ngram(ids), "n-gram")
    for _ in range(2):
        at = context(ids, tree, 0)
        child = tree.add(pick(Q[at], rng), 0, "draft", Q_TENSOR[at])
        at = context(ids, tree, child)
        tree.add(pick(Q[at], rng), child, "draft", Q_TENSOR[at])
    return tree


def chain_of_tree(ids: list[int], rng: random.Random) -> TokenTree:
    """What is left of a tree where the target reads chains only."""
    return sampled_tree(ids, rng, replacement=False).best_chain()


def chain_of_merged_tree(ids: list[int], rng: random.Random) -> TokenTree:
    return ngram_then_sampled(ids, rng).best_chain()


def no_draft(ids: list[int], rng: random.Random) -> TokenTree:
    return TokenTree.root(ids[-1])


CHAINS: list[Draft] = [sampled_chain, argmax_chain, chain_of_tree, chain_of_merged_tree, no_draft]
TREES: list[Draft] = [
    sampled_tree,
    tree_without_replacement,
    top_tree,
    sampled_then_ngram,
    without_replacement_then_ngram,
    ngram_then_sampled,
]


# -- verification --------------------------------------------------------------------------------------------------


def chain(tree: TokenTree, p: torch.Tensor, rng: random.Random) -> Outcome:
    return chain_rejection(tree, p, rng.random)


def tree(tree: TokenTree, p: torch.Tensor, rng: random.Random) -> Outcome:
    return tree_rejection(tree, p, rng.random)


def match(tree: TokenTree, p: torch.Tensor, rng: random.Random) -> Outcome:
    return sample_match(tree, p.log(), [rng.random() for _ in range(tree.depth + 1)])


def worst_p(counts: np.ndarray, joint: np.ndarray) -> float:
    """Of the tests of the first token, the first two, and all; times their number (Bonferroni)."""
    p_values = [p_value(counts, joint)]
    while joint.ndim > 1:
        counts, joint = counts.sum(-1), joint.sum(-1)
        p_values.append(p_value(counts, joint))
    return len(p_values) * min(p_values)


def fit(draft: Draft, verify: Verify, trials: int = 2000) -> float:
    """How well the first tokens fit the target's distribution."""
    rng = random.Random(0)
    counts = np.zeros((VOCAB,) * LENGTH)
    for _ in range(trials):
        ids = list(START)
        while len(ids) < len(START) + LENGTH:
            tree = draft(ids, rng)
            p = torch.stack([P_TENSOR[context(ids, tree, node)] for node in range(len(tree))])
            path, token = verify(tree, p, rng)
            ids += [tree.tokens[node] for node in path[1:]] + [token]
        counts[tuple(ids[len(START) :][:LENGTH])] += 1
    joint = np.einsum("a,ab,abc->abc", P[START[0], START[1]], P[START[1]], P)
    return worst_p(counts, joint)


@pytest.mark.parametrize("draft", CHAINS)
@pytest.mark.parametrize("verify", [chain, tree, match])
def test_chains(draft: Draft, verify: Verify) -> None:
    assert fit(draft, verify) > SIGNIFICANCE


@pytest.mark.parametrize("draft", TREES)
@pytest.mark.parametrize("verify", [tree, match])
def test_trees(draft: Draft, verify: Verify) -> None:
    assert fit(draft, verify) > SIGNIFICANCE


# -- what is known to be wrong must be found out -------------------------------------------------------------------


def uniform_q(ids: list[int], rng: random.Random, source: Draft) -> TokenTree:
    tree = source(ids, rng)
    tree.q = [None] + [torch.full((VOCAB,), 1 / VOCAB, dtype=torch.float64)] * tree.drafted
    return tree


def claims(replacement: bool) -> Draft:
    """Siblings drawn the other way than the tree says."""

    def draft(ids: list[int], rng: random.Random) -> TokenTree:
        tree = sampled_tree(ids, rng, replacement=not replacement)
        tree.replacement = replacement
        return tree

    return draft


def merged_into_fixed(ids: list[int], rng: random.Random) -> TokenTree:
    """A sampled token is dropped where a fixed sibling holds it already: it is, because of its value."""
    tree = TokenTree.root(ids[-1])
    at = context(ids, tree, 0)
    tree.add(int(Q[at].argmax()), 0, "top")
    token = pick(Q[at], rng)
    if tree.child(0, token) is None:
        tree.add(token, 0, "draft", Q_TENSOR[at])
    return tree


def likeliest_chain(ids: list[int], rng: random.Random) -> TokenTree:
    """Of several draws the one that is kept is chosen by its value."""
    tree, node, kept = sampled_tree(ids, rng), 0, []
    while children := tree.children(node):
        kept.append(node := max(children, key=lambda child: float(tree.q[child][tree.tokens[child]])))
    return tree.keep(kept)


BIASED: dict[str, tuple[Draft, Verify]] = {
    "stop rule that looks at the token": (lambda ids, rng: sampled_chain(ids, rng, lambda token: token != 1), chain),
    "stop rule that looks at the token, tree": (lambda ids, rng: sampled_chain(ids, rng, lambda t: t != 1), tree),
    "wrong q": (lambda ids, rng: uniform_q(ids, rng, sampled_chain), chain),
    "wrong q, tree": (lambda ids, rng: uniform_q(ids, rng, sampled_tree), tree),
    "argmax that claims to be sampled": (lambda ids, rng: uniform_q(ids, rng, argmax_chain), chain),
    "the likeliest of several draws": (likeliest_chain, chain),
    "drawn without replacement, verified as with": (claims(replacement=True), tree),
    "drawn with replacement, verified as without": (claims(replacement=False), tree),
    "sampled sibling merged into a fixed one": (merged_into_fixed, tree),
}


@pytest.mark.parametrize("control", BIASED)
def test_negative_control(control: str) -> None:
    assert fit(*BIASED[control]) < SIGNIFICANCE


# -- the whole engine ----------------------------------------------------------------------------------------------

TOKENS = 8
PROMPT = [1]  # without a prefill thousands of requests are cheap
REPEATS = [1, 1, 2, 1, 3, 1, 4, 1, 5, 1, 6, 1, 7, 1, 0, 1]  # whatever comes has come before


@pytest.fixture(scope="module")
def target() -> BlockTarget:
    return BlockTarget(small_llama(vocab_size=TOKENS, eos_token_id=None))


@pytest.fixture(scope="module")
def drafter_model() -> BlockTarget:
    return BlockTarget(perturbed(small_llama(vocab_size=TOKENS, eos_token_id=None), noise=0.3))


#: How to make a drafter that needs more than the target.
MAKE: dict[str, Callable[[BlockTarget, BlockTarget], Drafter]] = {
    "draft-model": lambda target, other: DraftModel(target, model=other),
    "early-exit": lambda target, _: early_exit(target),
    "eagle": lambda target, _: Eagle(target, head=EagleHead.from_target(target.model, 1, tokens=range(6)), extra=0),
    "eagle with tokens of the text": lambda target, _: Eagle(
        target, head=Eagle3Head.from_target(target.model, 1, tokens=range(6)), extra=1
    ),
    "medusa": lambda target, _: Medusa(target, head=MedusaHead.from_target(target.model, heads=2, tokens=range(6))),
    "dflash": lambda target, _: DFlash(target, head=DFlashHead.from_target(target.model, block=3, tokens=range(6))),
    **({"mtp": lambda target, _: Mtp(target, head=random_layer(target.model))} if MtpModel else {}),
    "draft-model that copies": lambda target, other: DraftModel(target, model=other, copy=True),
    "draft-model of another tokenizer": lambda target, other: with_another_tokenizer(target, other),
    "early-exit that copies": lambda target, _: early_exit(target, copy=True),
    "lookahead": lambda target, _: Lookahead(target, level=2, budget=30),  # three tokens are too short for more
    "rest": lambda target, _: Rest(target, datastore=datastore(), shortest=1, budget=5),
    "merge": lambda target, other: Merge(
        target, drafters=[DraftModel(target, model=other), Rest(target, datastore=datastore(), shortest=1)], budget=5
    ),
    "merge of early-exit": lambda target, _: Merge(
        target, drafters=[early_exit(target), Rest(target, datastore=datastore(), shortest=1)], budget=5
    ),
    "merge of layer-skip": lambda target, _: Merge(
        target, drafters=[LayerSkip(target), Rest(target, datastore=datastore(), shortest=1)], budget=5
    ),
    "merge of both": lambda target, _: Merge(target, drafters=[early_exit(target), LayerSkip(target)], budget=5),
}
#: Trees that are chosen, not drawn.
CHOSEN: dict[str, Callable[[BlockTarget], Drafter]] = {
    "early-exit": lambda target: EarlyExit(target, head=ExitHead.from_target(target.model, 1), tree=2, nodes=5),
    "eagle": lambda target: Eagle(target, head=EagleHead.from_target(target.model, 1), tree=2, budget=5),
    "medusa": lambda target: Medusa(
        target, head=MedusaHead.from_target(target.model, heads=2), tree="dynamic", budget=5
    ),
    "dflash": lambda target: DFlash(
        target, head=DFlashHead.from_target(target.model, block=3), tree="dynamic", budget=5
    ),
}
MERGES = [name for name in MAKE if name.startswith("merge of")]
#: Hundreds of requests a pass: no candidate would be worth verifying.
FIXED = ("prompt-lookup", "suffix", "recycling", "trigram", "auto")
TOKENS_OF_THEIR_OWN = ("eagle with tokens of the text", "draft-model of another tokenizer")
COPYING = [name for name in MAKE if name.endswith("copies")]


@pytest.mark.parametrize("name", ["early-exit", "eagle", "medusa", "dflash"])
@pytest.mark.parametrize("policy", ["fixed:k=2", "cali-ts:k_max=2"])
@pytest.mark.parametrize("sampling", [False, True])
def test_nothing_that_the_drafter_knows_is_allowed(
    name: str, policy: str, sampling: bool, target: BlockTarget, drafter_model: BlockTarget
) -> None:
    """The request's processors forbid all of a head's tokens at two places of three."""
    drafter = make(name, target, drafter_model)

    def allowed(_: int, ids: torch.Tensor) -> list[int]:
        return [6, 7] if len(ids) % 3 else list(range(TOKENS))

    request = Request(
        PROMPT,
        limit=12,
        policy=POLICIES.parse(policy).build(),
        processors=LogitsProcessorList([PrefixConstrainedLogitsProcessor(allowed, 1)]),
        sampling=sampling,
        seed=3,
        verifier="rejection",
    )
    for _ in Engine(target, drafter).run([request]):
        pass
    assert {request.ids[at] for at in range(1, len(request.ids)) if at % 3} <= {6, 7}


def early_exit(target: BlockTarget, copy: bool = False) -> EarlyExit:
    return EarlyExit(target, head=ExitHead.from_target(target.model, 1, tokens=range(6)), copy=copy)


def with_another_tokenizer(target: BlockTarget, other: BlockTarget) -> DraftModel:
    """The draft model has no token of the target's last, and one for a pair of others instead."""
    letters, model = "abcdefg", with_tokens(deepcopy(other.model), [6, 5, 4, 3, 2, 1, 0, 1])
    drafter = BlockTarget(model, pair_tokenizer(letters[::-1], [("a", "b")], "."))
    return DraftModel(BlockTarget(target.model, pair_tokenizer(letters, [], "h")), model=drafter)


def datastore() -> Datastore:
    tokens = np.random.default_rng(0).integers(0, TOKENS, 60).astype(np.uint16)
    suffixes = sorted(range(len(tokens)), key=lambda start: tokens[start:].tolist())
    return Datastore(tokens, np.array(suffixes, np.uint32), TOKENS)


def make(name: str, target: BlockTarget, other: BlockTarget) -> Drafter:
    options = {"budget": 8} if name in FIXED else {}
    return MAKE[name](target, other) if name in MAKE else DRAFTERS.get(name)(target, **options)


def exact(target: BlockTarget, params: SamplingParams, prompt: Sequence[int] = PROMPT) -> np.ndarray:
    """The joint distribution of the first three tokens, by transformers' forward and the processors one by one."""
    processors = params.processors(len(prompt), (), target.device)
    sequences = torch.tensor(list(itertools.product(range(TOKENS), repeat=2)))
    ids = torch.cat([torch.tensor(prompt).expand(len(sequences), -1), sequences], 1)
    with torch.inference_mode():
        logits = target.model(ids).logits
    steps = []
    for step in range(3):
        until = len(prompt) + step
        steps.append(processors(ids[:, :until], logits[:, until - 1].float()).softmax(-1).double().numpy())
    first = steps[0][0]
    second = steps[1].reshape(TOKENS, TOKENS, TOKENS)[:, 0]
    return np.einsum("a,ab,abc->abc", first, second, steps[2].reshape(TOKENS, TOKENS, TOKENS))


def engine_fit(
    target: BlockTarget,
    drafter: Drafter,
    policy: Callable[[], StoppingPolicy],
    verifier: str,
    trials: int = 900,
    seeded: bool = True,
    prompt: Sequence[int] = PROMPT,
    **sampling: object,
) -> tuple[float, int]:
    """How well the engine's first three tokens fit; and how many drafted tokens were accepted."""
    params = SamplingParams(temperature=1.0, max_new_tokens=4) if not sampling else SamplingParams(**sampling)
    requests = [
        Request(
            list(prompt),
            limit=4,
            policy=policy(),
            processors=params.processors(len(prompt), (), target.device),
            sampling=True,
            seed=seed if seeded else None,
            verifier=verifier,
        )
        for seed in range(trials)
    ]
    engine = Engine(target, drafter, prefixes=PrefixStore(8 * (len(prompt) + 4)))  # so that a prompt is read once
    for some in (requests[:1], requests[1:]):
        for _ in engine.run(some, batch=300):
            pass
    counts = np.zeros((TOKENS,) * 3)
    for request in requests:
        counts[tuple(request.output[:3])] += 1
    return worst_p(counts, exact(target, params, prompt)), sum(request.stats.accepted for request in requests)


ENGINES = [
    (drafter, "adaedl", "rejection")
    for drafter in (*DRAFTERS, *TOKENS_OF_THEIR_OWN, *COPYING)
    if drafter != "mtp" or MtpModel
]
#: With one drafter of each kind: another rule that looks at q; and the verification that gives plain decoding's own
#: tokens whatever drafts (test_conformance.py), so that their distribution needs no test with every drafter.
ENGINES += [
    (drafter, *how)
    for drafter in ("draft-model", "medusa", "merge", "auto")
    for how in (("max-confidence", "rejection"), ("fixed", "match"))
]


@pytest.mark.parametrize(("drafter", "policy", "verifier"), ENGINES)
def test_engine(
    target: BlockTarget,
    drafter_model: BlockTarget,
    drafter: str,
    policy: str,
    verifier: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, how = make(drafter, target, drafter_model), {}
    if drafter in FIXED or drafter in COPYING:
        # From one token they would hardly draft: here all have something to look up before the first.
        how = {"prompt": REPEATS}
        known = {token: [(token + 1 + rank) % TOKENS for rank in range(3)] for token in range(TOKENS)}
        monkeypatch.setattr(Recycling, "remember", lambda self, row: dict(known))
    p, accepted = engine_fit(target, made, POLICIES.parse(policy).build, verifier, **how)
    assert p > SIGNIFICANCE
    assert accepted > 75 or drafter == "none"


@pytest.mark.parametrize("drafter", CHOSEN)
def test_trees_of_heads(target: BlockTarget, drafter: str) -> None:
    p, accepted = engine_fit(target, CHOSEN[drafter](target), POLICIES.parse("fixed:k=2").build, "match")
    assert p > SIGNIFICANCE
    assert accepted > 100


@pytest.mark.parametrize("drafter", MERGES)
def test_merges_on_the_targets_cache(target: BlockTarget, drafter_model: BlockTarget, drafter: str) -> None:
    made = make(drafter, target, drafter_model)
    p, accepted = engine_fit(target, made, POLICIES.parse("fixed:k=2").build, "rejection", trials=600)
    assert p > SIGNIFICANCE
    assert accepted > 0


RANDOM_OR_TRAINED = ("beta-ts", "beta-ts:cost=0.4", "cali-ts", "cali-ts of hidden states", "specdec++", "disco")


@pytest.fixture(scope="module")
def rules(target: BlockTarget, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With predictors that say now this, now that, of what they see."""
    made = predictor_files.write(tmp_path_factory.mktemp("predictors"), 32, 32)
    made["cali-ts of hidden states"] = made.pop("cali-ts")
    return {name: made.get(name, name) for name in RANDOM_OR_TRAINED}


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("policy", RANDOM_OR_TRAINED)
def test_engine_under_random_and_trained_policies(
    target: BlockTarget, drafter_model: BlockTarget, rules: dict[str, str], policy: str, seeded: bool
) -> None:
    made = DraftModel(target, model=drafter_model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # what requests without a seed draw theirs from
        p, accepted = engine_fit(target, made, POLICIES.parse(rules[policy]).build, "rejection", seeded=seeded)
    assert p > SIGNIFICANCE
    assert accepted > 0


@pytest.mark.parametrize("policy", RANDOM_OR_TRAINED)
def test_a_row_gives_what_it_gives_alone(
    target: BlockTarget, drafter_model: BlockTarget, rules: dict[str, str], policy: str
) -> None:
    """Tokens and draft lengths, though policies draw lots."""

    def run(seeds: range) -> list[tuple[list[int], list[int]]]:
        requests = [
            Request(PROMPT, limit=24, policy=POLICIES.parse(rules[policy]).build(), sampling=True, seed=seed)
            for seed in seeds
        ]
        for _ in Engine(target, DraftModel(target, model=drafter_model)).run(requests, batch=3):
            pass
        return [(request.output, [record.depth for record in request.stats.rounds]) for request in requests]

    together, alone = run(range(5)), [run(range(seed, seed + 1))[0] for seed in range(5)]
    assert together == alone
    assert len({depth for _, depths in together for depth in depths}) > 1  # the policy does choose


@pytest.mark.parametrize(
    ("drafter", "verifier"), [("draft-model", "rejection"), ("trees", "rejection"), ("trees", "match")]
)
def test_engine_with_processors(target: BlockTarget, drafter_model: BlockTarget, drafter: str, verifier: str) -> None:
    """Each node is scored with its own history, and q is what the drafter's own processors made of it."""
    truth = {tuple(PROMPT): [1, 2, 3, 4]}  # the double's trees of fixed candidates around whatever sequence
    made = Oracle(target, truth, ["tree", "truth"]) if drafter == "trees" else make(drafter, target, drafter_model)
    options = {"temperature": 0.8, "top_k": 6, "min_p": 0.02, "repetition_penalty": 1.5, "max_new_tokens": 4}
    p, accepted = engine_fit(target, made, POLICIES.parse("fixed:k=3").build, verifier, **options)
    assert p > SIGNIFICANCE
    assert accepted > 0


class LooksAtTheToken(DraftModel):
    """Drops a token, and stops, because of which it is."""

    def _extend(self, row, tree, step):
        depth, more = tree.depth, super()._extend(row, tree, step)
        if tree.drafted > depth and tree.tokens[-1] in (0, 3, 5):
            for column in (tree.tokens, tree.parents, tree.q, tree.sources, tree.depths):
                column.pop()
            return False
        return more


class ReportsUniform(DraftModel):
    def _extend(self, row, tree, step):
        depth, more = tree.depth, super()._extend(row, tree, step)
        if tree.drafted > depth:
            tree.q[-1] = torch.full((TOKENS,), 1 / TOKENS)
        return more


class CopiesOverTheDraw(DraftModel):
    """Copies in place of a token because of which was drawn."""

    def _extend(self, row, tree, step):
        depth, more = tree.depth, super()._extend(row, tree, step)
        if tree.drafted > depth and tree.tokens[-1] in (0, 3, 5):
            tree.tokens[-1], tree.q[-1] = 1, None
        return more


@pytest.mark.parametrize("biased", [LooksAtTheToken, ReportsUniform, CopiesOverTheDraw])
def test_engine_negative_control(
    target: BlockTarget, drafter_model: BlockTarget, biased: type[AutoregressiveDrafter]
) -> None:
    drafter = biased(target, model=drafter_model)
    p, _ = engine_fit(target, drafter, POLICIES.parse("fixed").build, "rejection")
    assert p < SIGNIFICANCE


def test_layer_skip_drafts_are_sampled(target: BlockTarget) -> None:
    """The tests above would say nothing if the drafts were the target's own distribution."""
    assert LayerSkip(target).skip.sublayers
