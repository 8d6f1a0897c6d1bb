"""ADED (Liu et al., 2024): drafts from an adaptive n-gram matrix by tree search, without any training."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np

from paceline.drafters.trigram.matrix import FILE, ORDERS, Matrix, load_matrix, matrix_folder, no_matrix, token_bits
from paceline.drafters.trigram.mixture import Ngrams, Rule
from paceline.drafters.trigram.overlay import Overlay
from paceline.drafters.trigram.search import BY_LEVEL, BY_PATH, BY_VALUE, BY_VISITS, Plan, grow, new_arena
from paceline.drafting.base import Row
from paceline.drafting.tree import TokenTree
from paceline.drafting.tree_drafter import TreeDrafter
from paceline.errors import ModelError, require
from paceline.targets.target import PassOutput, Target

SHIPPED = Path(__file__).parents[2] / "data" / "trigram"  # a folder for each matrix that comes with paceline
SEARCHES = {"greedy": BY_PATH, "topk": BY_LEVEL, "mcts": BY_VISITS}
ADAPT = ("prompt", "output", "none")

log = logging.getLogger("paceline")


class Memory:
    """What the drafter knows of one request."""

    def __init__(self, overlay: Overlay, seed: int, skip: int) -> None:
        self.overlay, self.random = overlay, np.array([seed % 2**64], np.uint64)
        self.skip = skip  # leading tokens that are not learned from
        self.seen = skip  # tokens that were, and those


class Trigram(TreeDrafter):
    """A tree of likely continuations under n-grams of a corpus and of the request's own tokens.

    Args:
        matrix: folder that `paceline trigram build` made. "auto": the user's own for this model (`matrix_folder`), else
            one that comes with paceline; without either, or with "none", only what adaptation learns.
        order: n; default the matrix's, else 3.
        search: "greedy", best-first by the probability of the whole path, whose tree no other of its size beats under
            the same n-gram model; "mcts", the paper's; "topk", the likeliest first tokens, each with its likeliest
            continuation. Default greedy, with `literal` mcts.
        budget: most nodes of a tree; "auto": as many as pay on this machine.
        candidates: most continuations, that is, leaves of the tree.
        depth: most tokens of a continuation (the paper: 4).
        iterations, c1, c2: of MCTS, see Algorithm 1 and eq. 3.
        adapt: what a request's own n-grams are learned from: "prompt" (and output), "output" or "none".
        literal: the paper's search and probabilities as printed, and where it is silent as its authors' code has it:
            unvisited children first, expansion goes on from the last child, a path's reward is the sum of its
            probabilities. Contexts never seen in full have no successors. Each round Algorithm 2 adds `increment` to
            every n-gram of the last `window` tokens, up to `max_prob` (the paper gives no values).
        shared: half-life in tokens of a layer of n-grams that all requests learn and draft from; 0 for none. With it,
            the speed of one request tells about the output of others.
        seed: of MCTS's simulations.

    Raises:
        IntegrityError, TokenizerMismatch: the matrix named cannot be used.
    """

    default_policy = "fixed:k=8"
    source = "trigram"

    def __init__(
        self,
        target: Target,
        *,
        matrix: str | None = "auto",
        order: int | None = None,
        search: str | None = None,
        budget: int | str = "auto",
        candidates: int = 24,
        depth: int = 8,
        iterations: int = 150,
        c1: float = 32.0,
        c2: float = 8.0,
        adapt: str = "prompt",
        literal: bool = False,
        increment: float = 0.3,
        max_prob: float = 1.0,
        window: int = 64,
        shared: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(target, budget)
        search = search or ("mcts" if literal else "greedy")
        counted = {"candidates": candidates, "depth": depth, "iterations": iterations, "window": window}
        for name, value in counted.items():
            require(value >= 1, f"trigram: {name} must be >= 1, not {value}")
        require(order is None or order in ORDERS, f"trigram: order must be one of {ORDERS}, not {order}")
        require(search in SEARCHES, f"trigram: search must be one of {', '.join(SEARCHES)}, not '{search}'")
        require(adapt in ADAPT, f"trigram: adapt must be one of {', '.join(ADAPT)}, not '{adapt}'")
        require(c1 >= 0 and c2 > 0, f"trigram: need c1 >= 0 and c2 > 0, not {c1} and {c2}")
        require(0 < increment <= 1, f"trigram: increment must be above 0 and at most 1, not {increment}")
        require(0 < max_prob <= 1, f"trigram: max-prob must be above 0 and at most 1, not {max_prob}")
        require(shared >= 0, f"trigram: shared must be >= 0 tokens, not {shared}")
        require(not (literal and shared), "trigram: the paper's form has no shared layer; leave out shared or literal")

        found = find_matrix(target, matrix) or no_matrix(order or 3, target.vocab_size)
        order = order or found.order
        require(order <= found.order, f"trigram: the matrix has n-grams up to {found.order}, not {order}")
        self.tables = found.tables[found.order - order :]
        self.rule = Rule(order, token_bits(found.vocab), literal, increment, max_prob, 1.0)
        ranked = BY_VALUE if literal and search == "mcts" else SEARCHES[search]
        turns = iterations if search == "mcts" else 0
        self.plan = Plan(turns, c1, c2, depth, candidates, self.max_candidates, 0.0, ranked, literal)
        self.shared = Overlay(order, half_life=shared or 1.0)
        self.shares, self.adapt, self.window, self.seed = shared > 0, adapt, window, seed
        self.arena = new_arena(order, turns, self.max_candidates)
        self._compile()

    def _compile(self) -> None:
        """Have numba compile the search now, or read it from its cache, rather than in the first request's round."""
        started = time.perf_counter()
        overlay = Overlay(self.rule.order)
        overlay.learn([0, 0], 0)
        tail = np.zeros(self.rule.order - 1, np.int64)
        grow(self._ngrams(overlay), tail, self.plan, self.arena, np.zeros(1, np.uint64))
        if (seconds := time.perf_counter() - started) > 3:
            log.info("trigram: compiled the search in %.0f s; from now on it comes from numba's cache", seconds)

    def _ngrams(self, overlay: Overlay) -> Ngrams:
        rule = self.rule._replace(shared_scale=self.shared.scale)
        return Ngrams(self.tables, overlay.counts, self.shared.counts, rule)

    def max_nodes(self, depth: int) -> int:
        return min(self.plan.nodes, self.plan.candidates * min(depth, self.plan.depth))

    def remember(self, row: Row) -> Memory:
        order = self.rule.order
        overlay = Overlay(order, shortest=order if self.rule.literal else 2)
        memory = Memory(overlay, self.seed, skip=0 if self.adapt == "prompt" else len(row.ids))
        self._adapt(row, memory)
        return memory

    def propose(self, row: Row, memory: Memory, depth: int, min_score: float) -> TokenTree:
        tree = TokenTree.root(row.ids[-1])
        width = self.rule.order - 1
        tail = np.array([-1] * (width - len(row.ids)) + row.ids[-width:], np.int64)
        plan = self.plan._replace(depth=min(depth, self.plan.depth), min_score=min_score)
        drawn = grow(self._ngrams(memory.overlay), tail, plan, self.arena, memory.random)
        tokens, parents = self.arena.drawn[:, :drawn].tolist()
        for token, parent, score in zip(tokens, parents, self.arena.scores[:drawn].tolist(), strict=True):
            tree.add(token, parent, self.source, score=score)
        return tree

    def learn(self, row: Row, memory: Memory, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        if self.shares:
            self.shared.learn(row.ids, memory.seen)
        self._adapt(row, memory)

    def _adapt(self, row: Row, memory: Memory) -> None:
        """Self-improvement: Algorithm 2 goes over its window again, in our form each n-gram counts once."""
        if self.adapt != "none":
            again = self.rule.literal and memory.seen > memory.skip
            start = len(row.ids) - self.window + self.rule.order - 1 if again else memory.seen
            memory.overlay.learn(row.ids, max(start, memory.skip))
        memory.seen = len(row.ids)


def find_matrix(target: Target, matrix: str | None) -> Matrix | None:
    """The matrix that the option names; those that "auto" comes across need not fit."""
    if matrix is None or matrix == "none":
        return None
    if matrix != "auto":
        return load_matrix(Path(matrix).expanduser(), target.tokenizer, target.vocab_size)
    for path in [matrix_folder(target.name) / FILE, *sorted(SHIPPED.glob(f"*/{FILE}"))]:
        if path.is_file():
            try:
                return load_matrix(path, target.tokenizer, target.vocab_size)
            except ModelError as error:
                log.log(logging.INFO if SHIPPED in path.parents else logging.WARNING, "trigram: %s", error)
    return None
