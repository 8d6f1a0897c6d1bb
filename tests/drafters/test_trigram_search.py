"""The n-gram mixture and the searches, against plain Python."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.ngrams import Rows, counts_of, following, matrix_of, mixed, ngrams_of
from paceline.drafters.trigram.overlay import Overlay
from paceline.drafters.trigram.search import grow
from paceline.drafters.trigram.structures import (
    BY_LEVEL,
    BY_PATH,
    BY_VALUE,
    BY_VISITS,
    LEAST,
    Ngrams,
    Plan,
    new_arena,
)

VOCAB = 12
tokens = st.integers(0, VOCAB - 1)
texts = st.lists(tokens, max_size=60)

SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"rank": BY_PATH},
    "topk": {"rank": BY_LEVEL},
    "mcts": {"rank": BY_VISITS, "iterations": 60},
    "literal": {"rank": BY_VALUE, "iterations": 60, "literal": True},
}


def plan_of(**options: Any) -> Plan:
    defaults = {"iterations": 0, "c1": 32.0, "c2": 8.0, "depth": 4, "candidates": 24, "nodes": 24, "min_score": 0.0}
    return Plan(**{**defaults, "rank": BY_PATH, "literal": False, **options})


def draft(ngrams: Ngrams, tail: Sequence[int], plan: Plan, seed: int = 0) -> list[tuple[int, ...]]:
    """The nodes of a draft as paths from the root, in order."""
    arena = new_arena(ngrams.rule.order, plan.iterations, plan.nodes)
    size = grow(ngrams, np.array(tail, np.int64), plan, arena, np.array([seed], np.uint64))
    paths: list[tuple[int, ...]] = [()]
    for token, parent in arena.drawn[:, :size].T.tolist():
        paths.append((*paths[parent], token))
    return paths[1:]


def random_model(seed: int, order: int = 3, literal: bool = False) -> Ngrams:
    chance = random.Random(seed)
    rows: Rows = {}
    for first in range(VOCAB):
        for second in range(VOCAB):
            some = chance.sample(range(VOCAB), chance.randint(1, 6))
            weights = [chance.uniform(0.05, 1) for _ in some]
            share = chance.uniform(0.3, 0.95) / sum(weights)
            rows[(first, second)] = {token: share * weight for token, weight in zip(some, weights, strict=True)}
    overlay = Overlay(order, shortest=order if literal else 2)
    overlay.learn([chance.randrange(VOCAB) for _ in range(50)], 0)
    return ngrams_of(overlay, matrix_of(rows, order, VOCAB), literal=literal)


# -- the mixture -------------------------------------------------------------------------------------------------------
@given(own=texts, shared=texts, stored=texts, order=st.integers(2, 4), context=st.lists(tokens, min_size=1, max_size=5))
@settings(max_examples=150, deadline=None)
def test_mixture(own: list[int], shared: list[int], stored: list[int], order: int, context: list[int]) -> None:
    rows: Rows = {}
    for where, row in counts_of([stored], order).items():
        rows[where] = {token: (count - 0.75) / sum(row.values()) for token, count in row.items()}
    matrix = matrix_of(rows, order, VOCAB)
    for where in rows:  # as they come back from eight bits
        table = matrix.tables[order - 1 - len(where)]
        assert table.heads[-1] == len(table.keys)
        rows[where] = {token: 2 ** -(round(-24 * math.log2(p)) / 24) for token, p in rows[where].items()}
    mine, everyones = Overlay(order), Overlay(order)
    mine.learn(own, 0)
    everyones.learn(shared, 0)
    sources = [("counts", counts_of([own], order)), ("counts", counts_of([shared], order)), ("stored", rows)]
    found = following(ngrams_of(mine, matrix, everyones), context)
    assert found == pytest.approx(mixed(sources, context, order), abs=1e-5)
    assert sum(found.values()) < 1.02


def test_tokens_outside_the_matrix() -> None:
    ngrams = ngrams_of(Overlay(3), matrix_of({(1, 2): {3: 0.5}}, 3, VOCAB))
    assert following(ngrams, (1, 2)) == pytest.approx({3: 0.5}, rel=0.015)
    for context in ((1,), (1, VOCAB), (VOCAB + 5, 2), (10**6, 10**6)):
        assert following(ngrams, context) == {}


# -- the trees ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("search", SEARCHES)
def test_chain_is_followed(search: str) -> None:
    """Where only one thing ever follows, the draft is that, to the full depth."""
    overlay = Overlay(3, shortest=3 if search == "literal" else 2)
    overlay.learn([5, 6, 7, 8, 9, 10, 11], 0)
    ngrams = ngrams_of(overlay, matrix_of({}, 3, VOCAB), literal=search == "literal")
    path = draft(ngrams, (5, 6), plan_of(**SEARCHES[search]))
    assert path == [(7,), (7, 8), (7, 8, 9), (7, 8, 9, 10)]


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("seed", range(4))
def test_any_budget_is_a_beginning(search: str, seed: int) -> None:
    ngrams = random_model(seed, literal=search == "literal")
    for candidates in (3, 24):
        options = {**SEARCHES[search], "candidates": candidates}
        whole = draft(ngrams, (1, 2), plan_of(**options, nodes=60))
        assert whole
        for nodes in (1, 2, 5, 13, 24):
            assert draft(ngrams, (1, 2), plan_of(**options, nodes=nodes)) == whole[:nodes]


@given(
    seed=st.integers(0, 50),
    search=st.sampled_from(list(SEARCHES)),
    depth=st.integers(1, 6),
    candidates=st.integers(1, 12),
    nodes=st.integers(1, 40),
)
@settings(max_examples=80, deadline=None)
def test_shape(seed: int, search: str, depth: int, candidates: int, nodes: int) -> None:
    plan = plan_of(**SEARCHES[search], depth=depth, candidates=candidates, nodes=nodes)
    paths = draft(random_model(seed, literal=search == "literal"), (1, 2), plan)
    assert 1 <= len(paths) <= nodes
    assert len(set(paths)) == len(paths)
    assert max(map(len, paths)) <= depth
    leaves = set(paths) - {path[:-1] for path in paths}
    assert len(leaves) <= candidates
    if candidates == 1:
        assert len(paths) == max(map(len, paths))


@pytest.mark.parametrize("seed", range(5))
def test_greedy_is_the_best_tree(seed: int) -> None:
    """No set of as many nodes has a larger sum of path probabilities, the expected accepted length."""
    ngrams = random_model(seed)
    paths = {(): 1.0}
    for _ in range(3):
        for path, p in list(paths.items()):
            for token, q in following(ngrams, (1, 2, *path)).items():
                paths[(*path, token)] = p * q
    found = draft(ngrams, (1, 2), plan_of(depth=3, nodes=30, candidates=30))
    best = sorted((p for path, p in paths.items() if path), reverse=True)[:30]
    assert [paths[path] for path in found] == pytest.approx(best, rel=1e-4)


def test_topk_is_wide_first() -> None:
    ngrams = random_model(1)
    paths = draft(ngrams, (1, 2), plan_of(rank=BY_LEVEL, candidates=3, nodes=60))
    assert [len(path) for path in paths] == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    first = following(ngrams, (1, 2))
    assert {path[0] for path in paths} == set(sorted(first, key=lambda token: -first[token])[:3])


# -- Monte Carlo tree search -------------------------------------------------------------------------------------------
@dataclass
class Node:
    token: int
    parent: Node | None
    prior: float = 1.0
    path: float = 1.0
    visits: int = 0
    value: float = 0.0
    children: list[Node] | None = None
    chain: tuple[int, ...] = field(default=())


def splitmix(state: list[int]) -> float:
    mask = 2**64 - 1
    state[0] = (state[0] + 0x9E3779B97F4A7C15) & mask
    z = state[0]
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return ((z ^ (z >> 31)) >> 11) / 2**53


def f32(x: float) -> float:
    return float(np.float32(x))


def algorithm_1(ngrams: Ngrams, tail: tuple[int, ...], plan: Plan, seed: int) -> dict[tuple[int, ...], Node]:
    """Algorithm 1 in objects; its nodes by path."""
    root, state = Node(tail[-1], None), [seed]
    nodes = {(): root}
    for _ in range(plan.iterations):
        node = root
        while node.children and len(node.chain) < plan.depth:
            total = sum(child.visits for child in node.children)
            e = plan.c1 + math.log((total + plan.c2 + 1) / plan.c2)
            scores = []
            for child in node.children:
                unvisited = math.inf if plan.literal else 0.0
                q = child.value / child.visits if child.visits else unvisited
                scores.append(q + e * child.prior * math.sqrt(max(total, 1)) / (1 + child.visits))
            node = node.children[scores.index(max(scores))]
        if node.children is None and len(node.chain) < plan.depth:
            node.children = []
            for token, p in following(ngrams, (*tail, *node.chain)).items():
                child = Node(token, node, f32(p), f32(node.path * p), chain=(*node.chain, token))
                node.children.append(child)
                nodes[child.chain] = child
            if node.children:
                node = node.children[-1 if plan.literal else 0]
        chain, p, reward, up = list(node.chain), node.path, 0.0, node
        while up.parent:
            reward, up = reward + (up.prior if plan.literal else up.path), up.parent
        while len(chain) < plan.depth:
            row = following(ngrams, (*tail, *chain))
            if not row:
                break
            rest = splitmix(state) * sum(row.values())
            for token in row:
                if rest < row[token] or token == list(row)[-1]:
                    break
                rest -= row[token]
            chain.append(token)
            p *= row[token]
            reward += row[token] if plan.literal else p
        reward = 1.0 + reward if plan.literal else reward / plan.depth
        while node is not None:
            node.visits += 1
            node.value = f32(node.value + reward)
            node = node.parent  # type: ignore[assignment]
    return nodes


@pytest.mark.parametrize("search", ["mcts", "literal"])
@pytest.mark.parametrize("seed", range(6))
def test_algorithm_1(search: str, seed: int) -> None:
    """Visits and rewards of every node, as counted by a plain implementation with the same random numbers."""
    ngrams = random_model(seed, literal=search == "literal")
    plan = plan_of(**{**SEARCHES[search], "iterations": 150, "c1": (32.0, 2.414, 0.1)[seed % 3]}, nodes=1)
    arena = new_arena(3, plan.iterations, plan.nodes)
    grow(ngrams, np.array([1, 2]), plan, arena, np.array([seed], np.uint64))
    reference = algorithm_1(ngrams, (1, 2), plan, seed)
    found = {(): arena.nodes[0]}
    for node in arena.nodes[1:]:
        if node["parent"] >= 0 and node["depth"] > 0 and len(found) < len(reference):
            up, path = node, [int(node["token"])]
            while up["parent"] > 0:
                up = arena.nodes[up["parent"]]
                path.insert(0, int(up["token"]))
            found[tuple(path)] = node
    assert found.keys() == reference.keys()
    assert found[()]["visits"] == plan.iterations
    for path, node in reference.items():
        assert found[path]["visits"] == node.visits, path
        assert found[path]["value"] == pytest.approx(node.value, rel=1e-3), path


def test_same_seed_same_tree() -> None:
    ngrams = random_model(0, literal=True)
    plan = plan_of(**SEARCHES["literal"])
    trees = [draft(ngrams, (1, 2), plan, seed) for seed in (7, 7, 8, 9, 10)]
    assert trees[0] == trees[1]
    assert any(tree != trees[0] for tree in trees[2:])


def test_nothing_known() -> None:
    for search in SEARCHES.values():
        assert draft(ngrams_of(Overlay(3)), (-1, 2), plan_of(**search)) == []


def test_less_than_least_is_not_looked_for() -> None:
    overlay = Overlay(3)
    overlay.learn([1, 2, 3] * 600, 0)
    overlay.learn([9, 2, 4], 0)
    row = following(ngrams_of(overlay), (1, 2))
    assert row.keys() == {3}
    assert 1 - row[3] < LEAST
