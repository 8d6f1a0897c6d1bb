"""The draft maker (ADED, Algorithm 1): Monte Carlo tree search over continuations, and its alternatives, compiled.

The best continuations are drawn from one tree of contexts, in the order of their value, so that a smaller draft is
always the beginning of a larger one.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from jaxtyping import Integer

from paceline.compiled import compiled, int64
from paceline.drafters.trigram.mixture import successors
from paceline.drafters.trigram.structures import BY_LEVEL, BY_VALUE, BY_VISITS, Ngrams, Plan, SearchArena


@compiled
def grow(ngrams: Ngrams, tail: Integer[np.ndarray, " n-1"], plan: Plan, arena: SearchArena, random: np.ndarray) -> int:
    """Search for what follows a request's last tokens `tail`; returns how many nodes the draft in `arena.drawn` has.

    Args:
        random: state of the random numbers, uint64 `[1]`.
    """
    nodes = arena.nodes
    root = nodes[0]
    root.parent, root.depth, root.width, root.path = -1, 0, -1, 1.0
    root.visits, root.value, root.place, root.extended = 0, 0.0, 0, 0
    used = int64(1)  # not a plain 1, for whose type, "literal 1", numba would compile everything it is given to again
    for _ in range(plan.iterations):  # Algorithm 1, lines 2-45
        node = int64(0)
        while nodes[node].width > 0 and nodes[node].depth < plan.depth:  # selection
            node = _select(nodes, node, plan)
        if nodes[node].width < 0 and nodes[node].depth < plan.depth:  # expansion
            used = _expand(ngrams, arena, node, used, tail)
            if nodes[node].width > 0:
                node = int(nodes[node].first + (nodes[node].width - 1 if plan.literal else 0))
        reward = _simulate(ngrams, arena, node, tail, plan, random)
        while node >= 0:  # backpropagation
            nodes[node].visits += 1
            nodes[node].value += reward
            node = int(nodes[node].parent)
    return _draw(ngrams, arena, used, tail, plan)


@compiled
def _select(nodes: np.ndarray, node: int, plan: Plan) -> int:
    """The child with the highest score of eq. 2 and 3."""
    first = int(nodes[node].first)
    children = range(first, first + nodes[node].width)
    visits = 0
    for child in children:
        visits += nodes[child].visits
    exploration = plan.c1 + math.log((visits + plan.c2 + 1) / plan.c2)  # eq. 3
    exploration *= math.sqrt(max(visits, 1))
    chosen, best = first, -1.0
    for child in children:
        n = nodes[child].visits
        if n == 0 and plan.literal:
            return child
        q = nodes[child].value / n if n > 0 else 0.0
        score = q + exploration * nodes[child].prior / (1 + n)  # eq. 2
        if score > best:
            chosen, best = child, score
    return chosen


@compiled
def _expand(ngrams: Ngrams, arena: SearchArena, node: int, used: int, tail: np.ndarray) -> int:
    """Add the successors of a node as its children; returns how much of the arena is used then."""
    _load_context(arena, node, tail)
    count = successors(ngrams, arena.context, arena.tokens, arena.probs)
    parent = arena.nodes[node]
    parent.first, parent.width = used, count
    for place in range(count):
        child = arena.nodes[used + place]
        child.token, child.parent, child.depth, child.width = arena.tokens[place], node, parent.depth + 1, -1
        child.prior, child.path = arena.probs[place], parent.path * arena.probs[place]
        child.visits, child.value, child.extended = 0, 0.0, 0
    return used + count


@compiled
def _simulate(ngrams: Ngrams, arena: SearchArena, node: int, tail: np.ndarray, plan: Plan, random: np.ndarray) -> float:
    """Go on at random from a node to the full depth; the reward of the whole path.

    It is the expected number of accepted tokens along the path as a share of the depth; in the paper's form (lines
    35-38) 1 plus the sum of the n-gram probabilities.
    """
    nodes, context = arena.nodes, arena.context
    _load_context(arena, node, tail)
    path, left, reward = float(nodes[node].path), plan.depth - nodes[node].depth, 0.0
    while node > 0:
        reward += nodes[node].prior if plan.literal else nodes[node].path
        node = int(nodes[node].parent)
    for _ in range(left):
        count = successors(ngrams, context, arena.tokens, arena.probs)
        if count == 0:
            break
        rest, place = 0.0, 0
        for other in range(count):
            rest += arena.probs[other]
        rest *= _uniform(random)
        while place < count - 1 and rest >= arena.probs[place]:
            rest -= arena.probs[place]
            place += 1
        path *= arena.probs[place]
        reward += arena.probs[place] if plan.literal else path
        for at in range(context.size - 1):
            context[at] = context[at + 1]
        context[-1] = arena.tokens[place]
    return 1.0 + reward if plan.literal else reward / plan.depth


@compiled
def _draw(ngrams: Ngrams, arena: SearchArena, used: int, tail: np.ndarray, plan: Plan) -> int:
    """Draw the draft from the tree, the best node first and parents before children, looking up what MCTS did not.

    A node goes on with a continuation or branches off a new one; of those there are at most `plan.candidates`.
    """
    nodes, waiting, node = arena.nodes, int64(0), int64(0)
    drawn, leaves = 0, 0
    while drawn < plan.nodes:
        if nodes[node].depth < plan.depth:
            if nodes[node].width < 0:
                used = _expand(ngrams, arena, node, used, tail)
            first = int(nodes[node].first)
            for child in range(first, first + nodes[node].width):
                if nodes[child].path >= plan.min_score:
                    _push(arena.heap, waiting, child, _worth(nodes[child], plan))
                    waiting += 1
        node = -1
        while waiting > 0 and node < 0:
            waiting -= 1
            node = _pop(arena.heap, waiting)
            parent = int(nodes[node].parent)
            if parent == 0 or nodes[parent].extended:  # a continuation of its own
                if leaves < plan.candidates:
                    leaves += 1
                else:
                    node = -1
        if node < 0:
            break
        nodes[parent].extended = 1
        arena.drawn[0, drawn], arena.drawn[1, drawn] = nodes[node].token, nodes[parent].place
        arena.scores[drawn] = nodes[node].path
        drawn += 1
        nodes[node].place = drawn
    return drawn


class _Ranked(Protocol):
    """What of a NODE its worth is made of."""

    path: float
    depth: int
    visits: int
    value: float


@compiled
def _worth(node: _Ranked, plan: Plan) -> float:
    """What a node is ranked by; never less than its children. Ties go by path probability."""
    if plan.rank == BY_LEVEL:
        return node.path - node.depth
    if plan.rank == BY_VISITS:
        return node.path + node.visits
    if plan.rank == BY_VALUE:
        return node.path + node.value
    return node.path


@compiled
def _load_context(arena: SearchArena, node: int, tail: np.ndarray) -> None:
    """Put the last n - 1 tokens up to and including a node into `arena.context`."""
    at = arena.context.size - 1
    while node > 0 and at >= 0:
        arena.context[at] = arena.nodes[node].token
        node, at = int(arena.nodes[node].parent), at - 1
    for back in range(at + 1):  # the rest comes from the text, which ends with the root
        arena.context[at - back] = tail[tail.size - 1 - back]


@compiled
def _push(heap: np.ndarray, size: int, node: int, worth: float) -> None:
    """Add a node to the first `size` of the heap."""
    at = size
    while at > 0 and heap[(at - 1) >> 1].worth < worth:
        heap[at] = heap[(at - 1) >> 1]
        at = (at - 1) >> 1
    heap[at].node, heap[at].worth = node, worth


@compiled
def _pop(heap: np.ndarray, size: int) -> int:
    """Take the best node off the heap, of which `size` stay."""
    top, at, child = int(heap[0].node), 0, 1
    worth = heap[size].worth
    while child < size:
        if child + 1 < size and heap[child + 1].worth > heap[child].worth:
            child += 1
        if heap[child].worth <= worth:
            break
        heap[at] = heap[child]
        at, child = child, 2 * child + 1
    heap[at] = heap[size]
    return top


@compiled
def _uniform(state: np.ndarray) -> float:
    """The next number of a splitmix64 generator, in [0, 1): numba's own random state is the whole thread's."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.float64((z ^ (z >> np.uint64(31))) >> np.uint64(11)) / 9007199254740992.0
