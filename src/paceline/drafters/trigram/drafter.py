"""ADED (Liu et al., 2024): drafts from an adaptive n-gram matrix by tree search, without any training."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.drafters.trigram.guide import Guide
from paceline.drafters.trigram.lookup import Memory, TrigramLookup
from paceline.drafters.trigram.matrix import FILE, ORDERS, Matrix, load_matrix, matrix_folder, no_matrix, token_bits
from paceline.drafters.trigram.structures import BY_LEVEL, BY_PATH, BY_VALUE, BY_VISITS, Plan, Rule
from paceline.drafting.base import Row
from paceline.drafting.heads import with_blocks
from paceline.drafting.tree import TokenTree
from paceline.drafting.tree_drafter import LookupDrafter, max_candidates
from paceline.errors import CheckpointError, ModelError, PacelineError, require
from paceline.files import at_home
from paceline.registry import AUTO
from paceline.targets.native.build import available, built
from paceline.targets.target import PassOutput, Target

if TYPE_CHECKING:
    from paceline.drafters.trigram.structures import Guidance

SHIPPED = Path(__file__).parents[2] / "data" / "trigram"  # a folder for each matrix that comes with paceline
SEARCHES = {"greedy": BY_PATH, "topk": BY_LEVEL, "mcts": BY_VISITS}
ADAPT = ("prompt", "output", "none")
NONE = "none"

log = logging.getLogger("paceline")


class Trigram(LookupDrafter):
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
        guide: folder of a trained guide, or (from Python) a `Guide`, which is taken over; it chooses among the
            candidates for the next token by the target's hidden state (see `trigram.guide`). "auto": the one trained
            last for this model, or else an installed one, where the native tier's library can be used; "none": n-grams
            alone.
        shared: half-life in tokens of a layer of n-grams that all requests learn and draft from; 0 for none. With it,
            the speed of one request tells about the output of others.
        seed: of MCTS's simulations.

    Raises:
        IntegrityError, TokenizerMismatch: the matrix named cannot be used.
    """

    default_policy = "fixed:k=8"
    source = "trigram"
    files = ("matrix", "guide")
    lookup: TrigramLookup

    def __init__(
        self,
        target: Target,
        *,
        matrix: str | None = AUTO,
        order: int | None = None,
        search: str | None = None,
        budget: int | str = AUTO,
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
        guide: str = NONE,
        shared: float = 0.0,
        seed: int = 0,
    ) -> None:
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
        require(not literal or guide == NONE, "trigram: the paper's form has no guide; leave out guide or literal")
        require(not (literal and shared), "trigram: the paper's form has no shared layer; leave out shared or literal")

        found = find_matrix(target, matrix) or no_matrix(order or 3, target.vocab_size)
        order = order or found.order
        require(order <= found.order, f"trigram: the matrix has n-grams up to {found.order}, not {order}")
        ranked = BY_VALUE if literal and search == "mcts" else SEARCHES[search]
        turns, nodes = iterations if search == "mcts" else 0, max_candidates(budget, target)
        self.plan = Plan(turns, c1, c2, depth, candidates, nodes, 0.0, ranked, literal)
        rule = Rule(order, token_bits(found.vocab), literal, increment, max_prob, 1.0)
        self.awaits = guide if guide_comes(target, guide) else None  # until its engine gives the guide what it reads
        native = target.tier == "native" or built() or (self.awaits is not None and available())
        guidance = self._guidance(target, guide, native)
        lookup = TrigramLookup(
            found,
            rule,
            self.plan,
            adapt=adapt,
            window=window,
            shared=shared,
            seed=seed,
            native=native or guidance is not None,
            guide=guidance,
        )
        super().__init__(target, budget, lookup)
        self.taps = (target.num_layers,) if guidance else ()

    def _guidance(self, target: Target, guide: str, native: bool) -> Guidance | None:
        if guide == NONE or target.foreign or (guide == AUTO and (not native or target.chains_only)):
            return None
        try:
            read = with_blocks(target, Guide.kind)
            require(
                native or available(), "trigram: a guide runs in the native tier's library, which cannot be built here"
            )
            made, self.folder = Guide.take(guide, read)
        except PacelineError as error:
            if guide != AUTO:
                raise
            damaged = type(error) is CheckpointError  # not one for another model
            log.log(logging.WARNING if damaged else logging.INFO, "trigram: %s", error)
            return None
        from paceline.drafters.trigram.guided import LibraryGuide, rows_of

        return LibraryGuide(made, rows_of(target))

    @property
    def guided(self) -> bool:
        """Whether it has a guide, or will have one."""
        return bool(self.taps) or self.awaits is not None

    @property
    def prompt_taps(self) -> tuple[int, ...]:
        """None: the guide is asked from the second round on."""
        return ()

    def learn(self, row: Row, memory: Memory, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        super().learn(row, memory, tree, path, out)
        if self.taps:
            self.lookup.told(memory, out.taps[self.taps[0]][path[-1]])

    def max_nodes(self, depth: int) -> int:
        return min(self.plan.nodes, self.plan.candidates * min(depth, self.plan.depth))


def guide_comes(target: Target, guide: str) -> bool:
    """Whether another engine will give a guide what it reads of the model."""
    if guide == NONE or not target.foreign:
        return False
    if guide != AUTO:
        return True
    try:
        return Guide.find(target).is_dir()
    except PacelineError:
        return False


def find_matrix(target: Target, matrix: str | None) -> Matrix | None:
    """The matrix that the option names; those that "auto" comes across need not fit."""
    if matrix is None or matrix == "none":
        return None
    if matrix != AUTO:
        return load_matrix(at_home(matrix), target.tokenizer, target.vocab_size)
    for path in [matrix_folder(target.name) / FILE, *sorted(SHIPPED.glob(f"*/{FILE}"))]:
        if path.is_file():
            try:
                return load_matrix(path, target.tokenizer, target.vocab_size)
            except ModelError as error:
                log.log(logging.INFO if SHIPPED in path.parents else logging.WARNING, "trigram: %s", error)
    return None
