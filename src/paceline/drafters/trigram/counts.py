"""Counting n-grams, compiled: what `trigram.overlay` does with its arrays."""

from __future__ import annotations

import numpy as np

from paceline.compiled import compiled, int64
from paceline.drafters.trigram.structures import CONTEXTS, ENTRIES, Counts

SEED = np.uint64(0x9E3779B97F4A7C15)  # the hash of no context at all
_PRIME = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)
_ONE = np.uint64(1)


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
def learn(counts: Counts, ids: np.ndarray, start: int, shortest: int, longest: int, weight: float) -> None:
    """Count once more each n-gram of `ids` whose last token is at `start` or later."""
    for end in range(start, ids.size):
        hashed = SEED
        for n in range(2, min(longest, end + 1) + 1):
            hashed = step(hashed, ids[end - n + 1])
            if n >= shortest:
                _increment(counts, hashed, ids[end], weight)


@compiled
def rebuild(old: Counts, new: Counts, factor: float, least: float) -> None:
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
