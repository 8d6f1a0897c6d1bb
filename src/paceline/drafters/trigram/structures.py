"""What the search works on: plain arrays and numbers, for code that numba compiles and for the native tier's library.

The structures of `targets/native/ngrams.h` and `search.cpp` mirror these.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Float, Integer

from paceline.drafters.trigram.matrix import Table

WIDTH = 32  # most successors of a context that are looked at
LEAST = 0.002  # stop looking for less than this probability

# -- counts ------------------------------------------------------------------------------------------------------------
CONTEXTS, ENTRIES = 0, 1  # places in `Counts.used`

SLOT = np.dtype(
    [
        ("hash", np.uint64),  # of the context; 0 marks a free slot
        ("total", np.float32),  # sum of the successors' counts
        ("kinds", np.int32),  # how many different successors there are
        ("first", np.int32),  # the successor seen last, an entry
    ],
    align=True,
)
ENTRY = np.dtype(
    [
        ("token", np.int32),
        ("count", np.float32),
        ("next", np.int32),  # the successor seen before this one, or -1
    ],
    align=True,
)


class Counts(NamedTuple):
    """n-gram counts in arrays: an open-addressing table of contexts, each with a linked list of successors.

    Contexts of all orders share the table, by 64-bit hash: two that collide would cost acceptance, not correctness.
    """

    slots: np.ndarray  # of SLOT
    entries: np.ndarray  # of ENTRY
    used: Integer[np.ndarray, " 2"]  # contexts and entries


def empty_counts(room: int) -> Counts:
    """Counts of nothing, with room for so many different n-grams."""
    slots = 1 << int(2 * room - 1).bit_length()  # at most half full
    return Counts(np.zeros(slots, SLOT), np.zeros(room, ENTRY), np.zeros(2, np.int64))


def place_of(counts: Counts) -> tuple[int, int, int, int, int]:
    """Where the three arrays lie in memory, and the sizes of the first two."""
    slots, entries, used = counts
    return slots.ctypes.data, entries.ctypes.data, used.ctypes.data, slots.size, entries.size


class TextCounts(Protocol):
    """What is counted of a text, as the search reads it: an `Overlay`."""

    counts: Counts
    place: tuple[int, int, int, int, int]  # `place_of` the counts

    @property
    def scale(self) -> float: ...


class Guidance(Protocol):
    """A trained guide where compiled code reads it: see `trigram.guided`."""

    @property
    def c(self) -> ctypes.Structure: ...


# -- how they are read -------------------------------------------------------------------------------------------------
class Rule(NamedTuple):
    """How the sources are read."""

    order: int  # n
    bits: int  # of a token in the matrix's keys
    literal: bool  # the paper's form: `_literal`
    increment: float  # of Algorithm 2, literal only
    max_prob: float
    shared_scale: float  # see `Overlay.scale`


class Ngrams(NamedTuple):
    """Everything one request's drafts come from."""

    tables: tuple[Table, ...]  # of order n, n - 1, ..., 2
    own: Counts
    shared: Counts
    rule: Rule


# -- the search --------------------------------------------------------------------------------------------------------
BY_PATH, BY_LEVEL, BY_VISITS, BY_VALUE = range(4)  # how nodes are ranked


class Plan(NamedTuple):
    """What to search for."""

    iterations: int  # of MCTS; 0: best-first growth alone
    c1: float  # C1 and C2 of eq. 3
    c2: float
    depth: int
    candidates: int  # most continuations, that is, leaves of the draft
    nodes: int  # most nodes of the draft
    min_score: float  # probability of a path below which it is left out of the draft
    rank: int  # BY_...
    literal: bool


NODE = np.dtype(
    [
        ("token", np.int32),
        ("parent", np.int32),
        ("depth", np.int32),
        ("first", np.int32),  # of its children, which stand side by side
        ("width", np.int32),  # how many children; -1: not looked up yet
        ("prior", np.float32),  # P(s, a)
        ("path", np.float32),  # product of the priors from the root
        ("visits", np.int32),  # N(s, a)
        ("value", np.float32),  # sum of rewards W(s, a); Q = W / N
        ("place", np.int32),  # in the draft
        ("extended", np.int32),  # whether the draft goes on after it
    ],
    align=True,
)
WAITING = np.dtype([("node", np.int32), ("worth", np.float32)], align=True)


class SearchArena(NamedTuple):
    """Memory of a search, used again and again."""

    nodes: np.ndarray  # of NODE; node 0 is the root
    heap: np.ndarray  # of WAITING: nodes that may be drawn next, the best on top
    context: Integer[np.ndarray, " n-1"]
    tokens: Integer[np.ndarray, " WIDTH"]  # what `successors` gives
    probs: Float[np.ndarray, " WIDTH"]
    drawn: Integer[np.ndarray, "2 draft"]  # the draft: token and parent of each node, the root (0) left out
    scores: Float[np.ndarray, " draft"]  # and the probability of its path


def new_arena(order: int, iterations: int, nodes: int) -> SearchArena:
    """Memory for `iterations` and a draft of at most `nodes`: each can add the children of one node."""
    size = 1 + WIDTH * (iterations + nodes + 1)
    return SearchArena(
        np.zeros(size, NODE),
        np.zeros(size, WAITING),
        np.zeros(order - 1, np.int64),
        np.zeros(WIDTH, np.int64),
        np.zeros(WIDTH, np.float64),
        np.zeros((2, nodes), np.int64),
        np.zeros(nodes, np.float64),
    )
