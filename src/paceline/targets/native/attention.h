// Which keys a token sees, and the inner loops of attention: scores of queries against keys, weights from scores,
// values weighted.
//
// Blocking. Queries that see the same slots - the heads that share a key/value head, of neighbouring tokens - go
// through them together, so that keys and values are read once for several: scores take up to REGISTERS registers of
// queries (a register holds eight dimensions of WIDE / 8 queries, as a score is summed in eight lanes) by four keys,
// values QUERIES queries by four registers of dimensions.
#pragma once

#include <algorithm>

#include "native.h"
#include "vectors.h"

namespace paceline::PACELINE_ISA {

constexpr int CHUNK = 128;            // slots whose softmax is computed together
constexpr int PER = WIDE / LANES;     // queries in a register
constexpr int REGISTERS = 3;          // x 4 keys: 12 accumulators
constexpr int QUERIES = 3 * PER;      // x 4 registers of values: 12 accumulators of 16 registers, or 24 of 32
constexpr int AHEAD = 16;             // slots: so far in front of what is read, memory is asked for what comes

inline int listed(const Pass& pass, int t) {
    return pass.prefix[t] + pass.extra_start[t + 1] - pass.extra_start[t];
}

struct Range {
    int first, last;
    int size() const { return last - first; }
};

// The entries of its list that a token sees.
inline Range seen(const Pass& pass, int window, int t) {
    const int count = listed(pass, t);
    return {window ? std::max(0, count - window) : 0, count};
}

inline Range chunks(const Pass& pass, int window, int t) {
    const Range entries = seen(pass, window, t);
    return {entries.first / CHUNK, (entries.last + CHUNK - 1) / CHUNK};
}

// Those of any token.
inline Range chunks(const Pass& pass, int window, int first, int last) {
    Range all = chunks(pass, window, first);
    for (int t = first + 1; t < last; t++) {
        const Range some = chunks(pass, window, t);
        all = {std::min(all.first, some.first), std::max(all.last, some.last)};
    }
    return all;
}

// The last vector of a row is read up to the row's end only, unless its end is a vector's (WHOLE).
template <class V, bool WHOLE>
inline V load_dims(const float* p, int d, int dims) {
    constexpr int lanes = sizeof(V) / 4;
    if (WHOLE || d + lanes <= dims) return load<V>(p + d);
    V v = {};
    std::memcpy(&v, p + d, sizeof(float) * (dims - d));
    return v;
}

// Eight dimensions of a key, for every query of a register.
template <bool WHOLE>
inline wf load_key(const float* p, int d, int dims) {
    const vf key = load_dims<vf, WHOLE>(p, d, dims);
#if defined(__AVX512F__)
    return (wf)_mm512_broadcast_f32x8((__m256)key);
#else
    return key;
#endif
}

// Four keys' scores for each query of a register: v[i] holds key i's eight partial sums for each.
inline void store_sums(float* const* to, int at, const wf* v) {
    const wf ab = evens(v[0], v[1]) + odds(v[0], v[1]), cd = evens(v[2], v[3]) + odds(v[2], v[3]);
    const wf halves = evens(ab, cd) + odds(ab, cd);  // of each query: lanes 0-3 of its four keys, then lanes 4-7
#if defined(__AVX512F__)
    constexpr int others = 0xb1;  // each query's other half
    const __m512 sums = _mm512_add_ps((__m512)halves, _mm512_shuffle_f32x4((__m512)halves, (__m512)halves, others));
    _mm_storeu_ps(to[0] + at, _mm512_castps512_ps128(sums));
    _mm_storeu_ps(to[1] + at, _mm512_extractf32x4_ps(sums, 2));
#elif defined(__AVX2__)
    const __m256 both = (__m256)halves;
    _mm_storeu_ps(to[0] + at, _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1)));
#else
    for (int i = 0; i < 4; i++) to[0][at + i] = halves[i] + halves[4 + i];
#endif
}

// What is read AHEAD slots after entry j of from .. to-1: of `now`, and then of `next`. It is prefetched a little at a
// time, since a load waits while too many others are on their way.
inline const float* coming(const float* now, const float* next, const int32_t* slots, int j, int from, int to,
                           int dims) {
    const int at = j + AHEAD;
    return at < to ? now + (size_t)slots[at] * dims : next + (size_t)slots[std::min(at - to + from, to - 1)] * dims;
}

// gcc 12 leaves a function out that does nothing but prefetch, unless it is part of its caller from the first.
[[gnu::always_inline]] inline void prefetch(const float* row, int dims) {
    for (int d = 0; d < dims; d += PANEL) __builtin_prefetch(row + d, 0, 3);
}

// Scores of N registers of queries, `stride` floats apart, against the keys of slots[from .. to-1]. `next` are the
// values, which are read next; null: nothing is prefetched.
template <int N, bool WHOLE>
void score(const float* queries, int stride, int dims, const float* keys, const float* next, const int32_t* slots,
           int from, int to, float* const* scores) {
    for (int j = from; j < to; j += 4) {
        const float* key[4];
        for (int i = 0; i < 4; i++) {
            key[i] = keys + (size_t)slots[std::min(j + i, to - 1)] * dims;
            if (next) prefetch(coming(keys, next, slots, j + i, from, to, dims), dims);
        }
        wf a[N * 4] = {};
        for (int d = 0; d < dims; d += LANES) {
            wf query[N];
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) query[n] = keep(load<wf>(queries + n * stride + d * PER));
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                const wf k = keep(load_key<WHOLE>(key[i], d, dims));
#pragma GCC unroll 4
                for (int n = 0; n < N; n++) a[n * 4 + i] = fma(query[n], k, a[n * 4 + i]);
            }
        }
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) store_sums(scores + n * PER, j, a + n * 4);
    }
}

// to[g][d ..] += weights[g][j] * values of slots[j], over j = from .. to-1, N registers of dimensions from d on. `next`
// are the keys of the following chunk, which are read next; null: nothing is prefetched.
template <int G, int N, bool WHOLE>
void weigh(const float* const* weights, int d, int dims, const float* values, const float* next, const int32_t* slots,
           int from, int to, float* const* sums) {
    wf a[G * N];
#pragma GCC unroll 32
    for (int i = 0; i < G * N; i++) a[i] = load<wf>(sums[i / N] + d + i % N * WIDE);
    for (int j = from; j < to; j++) {
        const float* value = values + (size_t)slots[j] * dims;
        if (next) prefetch(coming(values, next, slots, j, from, to, dims), dims);
        wf weight[G];
#pragma GCC unroll 6
        for (int g = 0; g < G; g++) weight[g] = splat<wf>(weights[g][j]);
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) {
            const wf v = keep(load_dims<wf, WHOLE>(value, d + i * WIDE, dims));
#pragma GCC unroll 6
            for (int g = 0; g < G; g++) a[g * N + i] = fma(weight[g], v, a[g * N + i]);
        }
    }
#pragma GCC unroll 32
    for (int i = 0; i < G * N; i++) store(sums[i / N] + d + i % N * WIDE, a[i]);
}

// Scores to weights e^(scale * (score - maximum)), in place; m is the scaled maximum. The first `unseen`, fewer than a
// vector has, weigh nothing.
inline void soften(float* scores, int unseen, int count, float scale, float& m, float& s) {
    for (int j = 0; j < unseen; j++) scores[j] = scores[unseen];
    for (int j = count; j % LANES; j++) scores[j] = scores[count - 1];
    vf most = load<vf>(scores), total = {};
    for (int j = LANES; j < count; j += LANES) {
        const vf next = load<vf>(scores + j);
        most = next > most ? next : most;
    }
    float highest = most[0];
    for (int i = 1; i < LANES; i++) highest = std::max(highest, most[i]);
    m = highest * scale;
    for (int j = 0; j < count; j += WIDE)  // whole registers: scores have room for one beyond their last
        store(scores + j, exp((load<wf>(scores + j) - splat<wf>(highest)) * splat<wf>(scale)));
    for (int j = 0; j < unseen; j++) scores[j] = 0.0f;
    for (int j = count; j % LANES; j++) scores[j] = 0.0f;
    for (int j = 0; j < count; j += LANES) total += load<vf>(scores + j);
    s = sum(total);
}

}  // namespace paceline::PACELINE_ISA
