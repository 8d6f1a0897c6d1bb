"""The adaptive layer (ADED, Algorithm 2): n-grams of a request's own tokens, counted as they come.

Counts stand apart from the stored matrix, which many requests share: the search puts a probability together from both
when it asks for one, so that no request changes what another one sees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer

from paceline.compiled import compiled, int64

SEED = np.uint64(0x9E3779B97F4A7C15)  # the hash of no context at all
_PRIME = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)
_ONE = np.uint64(1)

CONTEXTS, ENTRIES = 0, 1  # places in `Counts.used`
FADED = 1 / 16  # decaying counts below this are dropped when room is made


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
    """Where the three arrays lie in memory, and the sizes of the first two, for `trigram.many`."""
    slots, entries, used = counts
    return slots.ctypes.data, entries.ctypes.data, used.ctypes.data, slots.size, entries.size


class Overlay:
    """Growing counts of the n-grams of orders `shortest` to `longest`.

    Args:
        half_life: tokens after which a count is worth half; by default counts stay.
    """

    def __init__(self, longest: int, shortest: int = 2, half_life: float = math.inf, room: int = 1024) -> None:
        self.longest, self.shortest, self.half_life = longest, shortest, half_life
        self.counts = empty_counts(room)
        self.place = place_of(self.counts)
        self._clock = 0.0  # half-lives since counts were last scaled

    @property
    def scale(self) -> float:
        """What a stored count is multiplied with to be worth its decayed value."""
        return math.pow(2.0, -self._clock)

    def learn(self, ids: Sequence[int], start: int) -> None:
        """Algorithm 2's loop: count once more each n-gram of `ids` whose last token is at `start` or later."""
        start = max(start, 0)
        new = len(ids) - start
        if new <= 0:
            return
        self._make_room(new * (self.longest - self.shortest + 1))
        begin = max(start - self.longest + 1, 0)
        tail = np.array(ids[begin:], np.int64)
        # Newer counts grow instead of older ones being scaled down one by one.
        _learn(self.counts, tail, start - begin, self.shortest, self.longest, 2.0**self._clock)
        self._clock += new / self.half_life

    def _make_room(self, entries: int) -> None:
        counts = self.counts
        if counts.used[ENTRIES] + entries <= len(counts.entries) and self._clock < 32:
            return
        if math.isfinite(self.half_life):
            counts = self._copied(counts, len(counts.entries), self.scale, FADED)
            self._clock = 0.0
        if 2 * (counts.used[ENTRIES] + entries) > len(counts.entries):
            counts = self._copied(counts, 2 * (len(counts.entries) + entries), 1.0, 0.0)
        self.counts, self.place = counts, place_of(counts)

    @staticmethod
    def _copied(counts: Counts, room: int, factor: float, least: float) -> Counts:
        copy = empty_counts(room)
        _rebuild(counts, copy, factor, least)
        return copy


@compiled
def step(hashed: np.uint64, token: int) -> np.uint64:
    """The hash of a context, one more token to the left of what `hashed` covers."""
    mixed = (hashed ^ np.uint64(token)) * _PRIME
    mixed ^= mixed >> _SHIFT
    return mixed | _ONE  # 0 marks a free slot


@compiled
def find(counts: Counts, hashed: np.uint64) -> int:
    """The slot of a context, or the free slot where it belongs."""
    last = counts.slots.size - 1
    slot = int64(hashed >> _SHIFT) & last
    while counts.slots[slot].hash != hashed and counts.slots[slot].hash != 0:
        slot = (slot + 1) & last
    return slot


@compiled
def _increment(counts: Counts, hashed: np.uint64, token: int, weight: float) -> None:
    entries, context = counts.entries, counts.slots[find(counts, hashed)]
    if context.hash == 0:
        context.hash, context.first = hashed, -1
        counts.used[CONTEXTS] += 1
    context.total += weight
    before, place = -1, int(context.first)
    while place >= 0 and entries[place].token != token:
        before, place = place, int(entries[place].next)
    if place < 0:
        place = counts.used[ENTRIES]
        counts.used[ENTRIES] += 1
        entries[place].token = token
        entries[place].count = 0.0
        context.kinds += 1
    elif before >= 0:
        entries[before].next = entries[place].next
    else:
        context.first = entries[place].next
    entries[place].count += weight
    entries[place].next = context.first  # it is now the most recent
    context.first = place


@compiled
def _learn(counts: Counts, ids: np.ndarray, start: int, shortest: int, longest: int, weight: float) -> None:
    for end in range(start, ids.size):
        hashed = SEED
        for n in range(2, min(longest, end + 1) + 1):
            hashed = step(hashed, ids[end - n + 1])
            if n >= shortest:
                _increment(counts, hashed, ids[end], weight)


@compiled
def _rebuild(old: Counts, new: Counts, factor: float, least: float) -> None:
    """Fill the empty `new` with the counts of `old` times `factor`, those below `least` left out."""
    for slot in range(old.slots.size):
        context, last = old.slots[slot], -1
        place = int(context.first) if context.hash != 0 else -1
        while place >= 0:
            count = old.entries[place].count * factor
            if count >= least:
                copy = new.slots[find(new, context.hash)]
                if last < 0:
                    copy.hash, copy.first = context.hash, new.used[ENTRIES]
                    new.used[CONTEXTS] += 1
                else:
                    new.entries[last].next = new.used[ENTRIES]
                copy.total += count
                copy.kinds += 1
                last = new.used[ENTRIES]
                new.used[ENTRIES] += 1
                new.entries[last].token, new.entries[last].count = old.entries[place].token, count
                new.entries[last].next = -1
            place = int(old.entries[place].next)
