"""Attention on CPU in float32 whose bits, for a token, depend on the keys it sees and on nothing else.

A token sees a *list* of keys: the committed ones, then its ancestors in the draft region; in a layer with a window the
end of that list. Scores, softmax and the sum of values go over it in order, in blocks counted from its beginning. Where
the keys lie (in a row, or prefix + tree path) only decides which address is read; how many tokens, heads or rows run
beside it, only in which thread.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray, njit

from paceline.compiled import int64
from paceline.targets.kernels import dot, exp
from paceline.targets.team import FAST, Floats, Integers, Kernel, barrier, floats, integers, part, parts, real

TILE = 4  # tokens that share the reading of a block of keys
BLOCK = 64  # keys a block: 16 KB at head_dim 64, half of the L1 cache

# The table of `attend`; sizes and strides in elements.
(
    QKV,  # [tokens, heads + 2 kv_heads, head_dim]; queries are rotated in place
    OUT,  # [tokens, heads, head_dim]
    # of the layer
    HEADS,
    KV_HEADS,
    HEAD_DIM,
    WINDOW,  # keys a token sees at most, the last of its list; 0: all
    ROTARY,  # rotated dimensions of a head
    COS,
    SIN,  # [positions, rotary / 2]
    QUERY_NORM,
    KEY_NORM,  # [head_dim] or 0
    NORM_WHOLE,  # 1: these norms are of all heads together, [heads * head_dim]
    HEAD_EPS,  # bits of a float
    SCORE_SCALE,  # bits of a float
    SCORE_CAP,  # bits of a float; 0: none
    SINKS,  # [heads] or 0: of each head, a score more in the softmax, without a value
    # of the layer's cache
    KEYS,
    VALUES,  # [batch, kv_heads, slots, head_dim]
    ROW_STRIDE,
    HEAD_STRIDE,
    BASES,  # [batch] or 0: the slots that the rows' keys and values begin with
    # of the pass
    BATCH,
    WIDTH,  # most tokens of a row
    OFFSET,  # of the pass in the draft region
    STARTS,  # [batch]: committed tokens
    FIRSTS,  # [batch + 1]: the first token of each row, then how many there are
    POSITIONS,  # [tokens]
    COUNTS,  # [tokens]: keys of a token's list
    PATHS,  # [tokens, 1 + region]: 0, then the slots after the row's start in its list; [1], a 0, for chains
    PATH_STRIDE,  # 0 for chains
    LONGEST,  # most keys of any list
    SCRATCH,  # [threads, TILE * group, longest]
    ATTEND_FIELDS,
) = range(33)


@njit(**FAST)
def _norm_whole(t: Integers, norm: int, at: int, size: int) -> None:
    x, weight = carray(floats(at), size), carray(floats(norm), size)
    scale = np.float32(1) / math.sqrt(dot(x, x) / np.float32(size) + real(t[HEAD_EPS]))
    for i in range(size):
        x[i] = x[i] * scale * weight[i]


@njit(inline="always")
def _firsts(t: Integers) -> Integers:
    return carray(integers(t[FIRSTS]), t[BATCH] + 1)


@njit(inline="always")
def _row(t: Integers, token: int) -> int:
    firsts, row = _firsts(t), int64(0)
    while firsts[row + 1] <= token:
        row += 1
    return row


@njit(inline="always")
def _base(t: Integers, row: int) -> int:
    return carray(integers(t[BASES]), t[BATCH])[row] if t[BASES] else int64(0)


@njit(**FAST)
def _rotate_and_store(t: Integers, token: int) -> None:
    heads, kv_heads, size, half = t[HEADS], t[KV_HEADS], t[HEAD_DIM], t[ROTARY] // 2
    row = _row(t, token)
    slot = carray(integers(t[STARTS]), t[BATCH])[row] + t[OFFSET] + token - _firsts(t)[row] - _base(t, row)
    at = 4 * half * carray(integers(t[POSITIONS]), token + 1)[token]
    cos, sin = carray(floats(t[COS] + at), half), carray(floats(t[SIN] + at), half)
    scaling = real(t[SCORE_SCALE])
    qkv = carray(floats(t[QKV] + 4 * token * (heads + 2 * kv_heads) * size), (heads + 2 * kv_heads, size))
    if t[NORM_WHOLE]:
        _norm_whole(t, t[QUERY_NORM], t[QKV] + 4 * token * (heads + 2 * kv_heads) * size, heads * size)
        _norm_whole(t, t[KEY_NORM], t[QKV] + 4 * (token * (heads + 2 * kv_heads) + heads) * size, kv_heads * size)
    for head in range(heads + 2 * kv_heads):
        x = qkv[head]
        if head < heads + kv_heads:
            norm = t[QUERY_NORM] if head < heads else t[KEY_NORM]
            if norm != 0 and not t[NORM_WHOLE]:
                weight = carray(floats(norm), size)
                scale = np.float32(1) / math.sqrt(dot(x, x) / np.float32(size) + real(t[HEAD_EPS]))
                for i in range(size):
                    x[i] = x[i] * scale * weight[i]
            for i in range(half):
                a, b = x[i], x[half + i]
                x[i] = a * cos[i] - b * sin[i]
                x[half + i] = b * cos[i] + a * sin[i]
        if head < heads:
            for i in range(size):
                x[i] *= scaling
        else:
            store, kv = (t[KEYS], head - heads) if head < heads + kv_heads else (t[VALUES], head - heads - kv_heads)
            target = carray(floats(store + 4 * (row * t[ROW_STRIDE] + kv * t[HEAD_STRIDE] + slot * size)), size)
            for i in range(size):
                target[i] = x[i]


@njit(inline="always")
def _first(t: Integers, count: int) -> int:
    """The first key that a token sees of a list of so many."""
    return max(count - t[WINDOW], 0) if t[WINDOW] else int64(0)


@njit(inline="always")
def _slot(place: int, start: int, path: Integers) -> np.uint64:
    """Where the key at a place of the list lies. No branch, and unsigned: else the loops around it stay scalar."""
    return np.uint64(min(place, start) + path[max(place - start + 1, 0)])


@njit(inline="always")
def _path(t: Integers, token: int) -> Integers:
    return carray(integers(t[PATHS] + 8 * token * t[PATH_STRIDE]), max(t[PATH_STRIDE], 1))


@njit(inline="always", **FAST)
def _score_of(
    size: int, query: Floats, keys: Floats, start: int, path: Integers, scores: Floats, place: int, stop: int
) -> None:
    while place + 4 <= stop:
        k0, k1 = keys[_slot(place, start, path)], keys[_slot(place + 1, start, path)]
        k2, k3 = keys[_slot(place + 2, start, path)], keys[_slot(place + 3, start, path)]
        s0 = s1 = s2 = s3 = np.float32(0)
        for i in range(size):
            x = query[i]
            s0 += x * k0[i]
            s1 += x * k1[i]
            s2 += x * k2[i]
            s3 += x * k3[i]
        scores[place], scores[place + 1], scores[place + 2], scores[place + 3] = s0, s1, s2, s3
        place += 4
    while place < stop:
        scores[place] = dot(query, keys[_slot(place, start, path)])
        place += 1


@njit(**FAST)
def _score(
    size: int, query: Floats, keys: Floats, start: int, path: Integers, scores: Floats, place: int, stop: int
) -> None:
    """scores[place .. stop-1] = query . key. The usual head dimensions as constants: that is a quarter faster."""
    if size == 64:
        _score_of(64, query, keys, start, path, scores, place, stop)
    elif size == 128:
        _score_of(128, query, keys, start, path, scores, place, stop)
    else:
        _score_of(size, query, keys, start, path, scores, place, stop)


@njit(inline="always", **FAST)
def _collect_of(
    size: int, weights: Floats, values: Floats, start: int, path: Integers, out: Floats, place: int, stop: int
) -> None:
    while place + 4 <= stop:
        v0, v1 = values[_slot(place, start, path)], values[_slot(place + 1, start, path)]
        v2, v3 = values[_slot(place + 2, start, path)], values[_slot(place + 3, start, path)]
        w0, w1, w2, w3 = weights[place], weights[place + 1], weights[place + 2], weights[place + 3]
        for i in range(size):
            out[i] += (w0 * v0[i] + w1 * v1[i]) + (w2 * v2[i] + w3 * v3[i])
        place += 4
    while place < stop:
        value, weight = values[_slot(place, start, path)], weights[place]
        for i in range(size):
            out[i] += weight * value[i]
        place += 1


@njit(**FAST)
def _collect(
    size: int, weights: Floats, values: Floats, start: int, path: Integers, out: Floats, place: int, stop: int
) -> None:
    """out += weights[place .. stop-1] . values; see `_score`."""
    if size == 64:
        _collect_of(64, weights, values, start, path, out, place, stop)
    elif size == 128:
        _collect_of(128, weights, values, start, path, out, place, stop)
    else:
        _collect_of(size, weights, values, start, path, out, place, stop)


@njit(**FAST)
def _cap(scores: Floats, cap: np.float32) -> None:
    for place in range(scores.size):
        scores[place] = cap * math.tanh(scores[place] / cap)


@njit(**FAST)
def _softmax(scores: Floats, sink: np.float32) -> None:
    """`sink`: one more score, without a place of its own; minus infinity where there is none."""
    h0 = h1 = h2 = h3 = scores[0]  # four, since one would wait for itself; the order of a maximum is free
    whole = scores.size // 4 * 4
    for place in range(0, whole, 4):
        h0, h1 = max(h0, scores[place]), max(h1, scores[place + 1])
        h2, h3 = max(h2, scores[place + 2]), max(h3, scores[place + 3])
    for place in range(whole, scores.size):
        h0 = max(h0, scores[place])
    highest = max(max(max(h0, h1), max(h2, h3)), sink)
    for place in range(scores.size):
        scores[place] = exp(scores[place] - highest)
    total = np.float32(0)
    for place in range(scores.size):
        total += scores[place]
    if sink > -np.inf:
        total += exp(sink - highest)
    scale = np.float32(1) / total
    for place in range(scores.size):
        scores[place] *= scale


@njit(inline="always")
def _sink(t: Integers, head: int) -> np.float32:
    return carray(floats(t[SINKS]), t[HEADS])[head] if t[SINKS] else np.float32(-np.inf)


@njit(**FAST)
def _attend_tile(t: Integers, row: int, first: int, low: int, high: int) -> None:
    """Heads `low .. high-1` of the row's tokens from `first` on, at most TILE."""
    heads, size, longest = t[HEADS], t[HEAD_DIM], t[LONGEST]
    token = _firsts(t)[row] + first
    group, tokens = heads // t[KV_HEADS], min(TILE, _firsts(t)[row + 1] - token)
    if tokens <= 0:
        return
    counts = carray(integers(t[COUNTS] + 8 * token), tokens)
    most, least = int64(0), _first(t, counts[0])
    for i in range(tokens):
        most, least = max(most, counts[i]), min(least, _first(t, counts[i]))
    least = least // BLOCK * BLOCK
    start = carray(integers(t[STARTS]), t[BATCH])[row] if t[PATH_STRIDE] else most
    queries = carray(
        floats(t[QKV] + 4 * token * (heads + 2 * t[KV_HEADS]) * size), (tokens, heads + 2 * t[KV_HEADS], size)
    )
    out = carray(floats(t[OUT] + 4 * token * heads * size), (tokens, heads, size))
    scores = carray(floats(t[SCRATCH] + 4 * part() * TILE * group * longest), (TILE * group, longest))
    while low < high:
        kv = low // group
        some = min(high, (kv + 1) * group) - low
        at = 4 * (row * t[ROW_STRIDE] + kv * t[HEAD_STRIDE] - _base(t, row) * size)
        keys, values = carray(floats(t[KEYS] + at), (most, size)), carray(floats(t[VALUES] + at), (most, size))
        for block in range(least, most, BLOCK):
            for i in range(tokens):
                path, at, stop = _path(t, token + i), max(block, _first(t, counts[i])), min(block + BLOCK, counts[i])
                for head in range(some):
                    _score(size, queries[i, low + head], keys, start, path, scores[i * group + head], at, stop)
        for i in range(tokens):
            for head in range(some):
                seen = scores[i * group + head, _first(t, counts[i]) : counts[i]]
                if t[SCORE_CAP]:
                    _cap(seen, real(t[SCORE_CAP]))
                _softmax(seen, _sink(t, low + head))
                out[i, low + head, :] = np.float32(0)
        for block in range(least, most, BLOCK):
            for i in range(tokens):
                path, at, stop = _path(t, token + i), max(block, _first(t, counts[i])), min(block + BLOCK, counts[i])
                for head in range(some):
                    _collect(size, scores[i * group + head], values, start, path, out[i, low + head], at, stop)
        low += some


@Kernel
def attend(t: Integers) -> None:
    """Rotate queries and keys, store keys and values in the cache, then softmax(q k^T) v for every token and head."""
    for token in range(part(), _firsts(t)[t[BATCH]], parts()):
        _rotate_and_store(t, token)
    barrier()
    tiles = (t[WIDTH] + TILE - 1) // TILE
    pairs, heads = t[BATCH] * tiles, t[HEADS]
    if pairs >= 2 * parts():
        for pair in range(part(), pairs, parts()):
            _attend_tile(t, pair // tiles, pair % tiles * TILE, 0, heads)
    else:  # too few for every thread to have its own: divide the heads as well
        first, last = pairs * heads * part() // parts(), pairs * heads * (part() + 1) // parts()
        for pair in range(pairs):
            low, high = max(0, first - pair * heads), min(heads, last - pair * heads)
            if low < high:
                _attend_tile(t, pair // tiles, pair % tiles * TILE, low, high)
