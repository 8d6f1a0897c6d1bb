// Vectors of eight lanes, and of as many as a register of the instruction set holds.
//
// Where lanes are outputs or dimensions, which never meet, a vector is as wide as a register (`wf`). Where lanes are
// partial sums that are added up in the end, their number decides the result: eight (`vf`) on every instruction set.
#pragma once

#include <cstring>

#include "native.h"

#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// gcc has it from version 12 on; Ubuntu 22.04's is 11. Its own one takes the lanes as a vector of whole numbers.
#if defined(__GNUC__) && __GNUC__ < 12 && !defined(__clang__)
#define __builtin_shufflevector(a, b, ...) __builtin_shuffle(a, b, (decltype((a) == (b))){__VA_ARGS__})
#endif

namespace paceline::PACELINE_ISA {

#if defined(__AVX512F__)
constexpr int WIDE = 16;  // lanes of a register
#else
constexpr int WIDE = 8;  // the compiler splits them where registers are narrower
#endif
constexpr int VECTORS = PANEL / WIDE;  // that a panel's outputs are

template <int N>
struct Lanes {
    typedef float f __attribute__((vector_size(4 * N)));
    typedef int32_t i __attribute__((vector_size(4 * N)));
    typedef uint32_t u __attribute__((vector_size(4 * N)));
    typedef uint16_t h __attribute__((vector_size(2 * N)));
    typedef int8_t b __attribute__((vector_size(N)));
};
using vf = Lanes<LANES>::f;
using vi = Lanes<LANES>::i;
using wf = Lanes<WIDE>::f;
using wi = Lanes<WIDE>::i;
using wu = Lanes<WIDE>::u;
using wh = Lanes<WIDE>::h;
using wb = Lanes<WIDE>::b;

template <class V>
inline V load(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <class V>
inline void store(float* p, V v) {
    std::memcpy(p, &v, sizeof v);
}

template <class V>
inline V splat(float s) {
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64) return (V)_mm512_set1_ps(s);
    else
#endif
        return V{s, s, s, s, s, s, s, s};
}

#if defined(__FMA__)
template <class V>
inline V fma(V a, V b, V c) {
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64) return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
    else
#endif
        return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
#elif defined(__ARM_NEON) && defined(__aarch64__)
inline vf fma(vf a, vf b, vf c) {
    float32x4_t x[2], y[2], z[2];
    std::memcpy(x, &a, sizeof a), std::memcpy(y, &b, sizeof b), std::memcpy(z, &c, sizeof c);
    for (int i = 0; i < 2; i++) z[i] = vfmaq_f32(z[i], x[i], y[i]);
    return load<vf>(z);
}
#else
// In software where the processor has no such instruction: rounded once all the same. A call, as it is long.
[[gnu::noinline]] inline vf fma(vf a, vf b, vf c) {
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
}
#endif

// u * d + m. With sixteen registers m stays in memory, lest an accumulator has to.
#if defined(__FMA__) && !defined(__AVX512F__)
inline wf scale(wf u, wf d, const wf& m) {
    asm("vfmadd213ps %2, %1, %0" : "+x"(u) : "x"(d), "m"(m));
    return u;
}
#else
inline wf scale(wf u, wf d, wf m) { return fma(u, d, m); }
#endif

// Holds a value in a register: left alone, gcc loads a weight again for each of its uses.
template <class V>
inline V keep(V v) {
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#elif defined(__AVX2__)
    asm("" : "+x"(v));
#endif
    return v;
}

// What `both` makes of sixteen lanes, two by two; in each lane.
template <class V, class Both>
inline V fold(V v, Both both) {
    v = both(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = both(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = both(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    return both(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
}

// The multiply-adds of a matrix product's inner loop, where gcc 12 would otherwise choose badly: sums[i] += *value *
// weights[i], each in the register that holds its sum. A value that serves several vectors is brought into a register
// once: as part of each instruction it would take one of the two loads a cycle (Sapphire Rapids reaches 70 % of its
// multiply-adds that way, 90 % with three vectors). One that serves a single vector is part of the instruction.
template <int N>
inline void add_products(wf* sums, const float* value, const wf* weights) {
#if defined(__AVX512F__)
    if constexpr (N == 1) {
        asm("vfmadd231ps %1%{1to16%}, %2, %0" : "+v"(sums[0]) : "m"(*value), "v"(weights[0]));
        return;
    }
#endif
    const wf all = keep(splat<wf>(*value));
#pragma GCC unroll 8
    for (int i = 0; i < N; i++)
#if defined(__AVX512F__)
        asm("vfmadd231ps %1, %2, %0" : "+v"(sums[i]) : "v"(all), "v"(weights[i]));
#elif defined(__FMA__)
        asm("vfmadd231ps %1, %2, %0" : "+x"(sums[i]) : "x"(all), "x"(weights[i]));
#else
        sums[i] = fma(all, weights[i], sums[i]);
#endif
}

// Sixteen-bit floats; exact for all finite values.
inline wf half(const uint8_t* from) {
#if defined(__AVX512F__)
    return (wf)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__F16C__)
    return (wf)_mm256_cvtph_ps(load<__m128i>(from));
#else
    const wu wide = __builtin_convertvector(load<wh>(from), wu);
    const wf magnitude = (wf)((wide & 0x7fffu) << 13) * splat<wf>(0x1p112f);
    return (wf)((wu)magnitude | ((wide & 0x8000u) << 16));
#endif
}

// Whole numbers of a byte each. gcc 12 widens them one by one, unless told how.
inline wf whole(const uint8_t* from) {
#if defined(__AVX512F__)
    const wi numbers = (wi)_mm512_cvtepi8_epi32(load<__m128i>(from));
#elif defined(__AVX2__)
    const wi numbers = (wi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    const wi numbers = __builtin_convertvector(load<wb>(from), wi);
#endif
    return __builtin_convertvector(numbers, wf);
}

// In every four lanes: two of `a`, then two of `b`; the even ones or the odd ones.
template <class V>
inline V evens(V a, V b) {
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64) return (V)_mm512_shuffle_ps((__m512)a, (__m512)b, 0x88);
    else
#endif
#if defined(__AVX2__)
        return (V)_mm256_shuffle_ps((__m256)a, (__m256)b, 0x88);
#else
        return V{a[0], a[2], b[0], b[2], a[4], a[6], b[4], b[6]};
#endif
}
template <class V>
inline V odds(V a, V b) {
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64) return (V)_mm512_shuffle_ps((__m512)a, (__m512)b, 0xdd);
    else
#endif
#if defined(__AVX2__)
        return (V)_mm256_shuffle_ps((__m256)a, (__m256)b, 0xdd);
#else
        return V{a[1], a[3], b[1], b[3], a[5], a[7], b[5], b[7]};
#endif
}

inline float sum(vf v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

// e^x to 2 ulp (Cephes' expf): split off n*ln2, a polynomial for the rest, n into the exponent.
template <class V>
inline V exp(V x) {
    using U = typename Lanes<sizeof(V) / 4>::u;
    x = x < splat<V>(-87.3f) ? splat<V>(-87.3f) : x;
    x = x > splat<V>(88.3f) ? splat<V>(88.3f) : x;
    const V magic = splat<V>(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    V shifted = fma(x, splat<V>(1.44269504f), magic);
    V n = shifted - magic;
    V r = fma(n, splat<V>(-0.693359375f), x);
    r = fma(n, splat<V>(2.12194440e-4f), r);
    V p = splat<V>(1.9875691500e-4f);
    p = fma(p, r, splat<V>(1.3981999507e-3f));
    p = fma(p, r, splat<V>(8.3334519073e-3f));
    p = fma(p, r, splat<V>(4.1665795894e-2f));
    p = fma(p, r, splat<V>(1.6666665459e-1f));
    p = fma(p, r, splat<V>(5.0000001201e-1f));
    p = fma(p, r * r, r + splat<V>(1.0f));
    U exponent = ((U)shifted - (U)magic + 127u) << 23;
    return p * (V)exponent;
}

}  // namespace paceline::PACELINE_ISA
