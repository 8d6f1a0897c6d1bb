// How the weights of a panel (16 outputs) are stored: `unit` inputs lie in `bytes` bytes, the same bytes for every
// instruction set. A storage is constructed at such a unit; get(turn, i, v) then gives the weights of input turn + i for
// the panel's vector v of outputs. `turn` is a multiple of TURN, and i below it: what the compiler unrolls.
#pragma once

#include "vectors.h"

namespace paceline::PACELINE_ISA {

constexpr int TURN = 8;

struct StoreF32 {
    static constexpr int unit = 8, bytes = unit * PANEL * 4;
    const uint8_t* p;
    explicit StoreF32(const uint8_t* at) : p(at) {}
    wf get(int turn, int i, int v) const { return load<wf>(p + ((turn + i) * PANEL + v * WIDE) * 4); }

    static void write(uint8_t* to, const uint8_t* row, int k, int count, int lane) {
        for (int i = 0; i < count; i++) std::memcpy(to + (i * PANEL + lane) * 4, row + (k + i) * 4, 4);
    }
};

struct StoreBF16 {  // a 32-bit lane holds the weights of two inputs
    static constexpr int unit = 8, bytes = unit * PANEL * 2;
    const uint8_t* p;
    explicit StoreBF16(const uint8_t* at) : p(at) {}
    wf get(int turn, int i, int v) const {
        const wu pair = load<wu>(p + ((turn / 2 + i / 2) * PANEL + v * WIDE) * 4);
        return (wf)(i % 2 ? pair & 0xffff0000u : pair << 16);
    }
    static void write(uint8_t* to, const uint8_t* row, int k, int count, int lane) {
        for (int i = 0; i < count; i++)
            std::memcpy(to + (i / 2 * PANEL + lane) * 4 + i % 2 * 2, row + (k + i) * 2, 2);
    }
};

// GGUF's blocks of 32 inputs are all w = d * u + m with unsigned u of 4 or 8 bits (Q8_0: u = q + 128, m = -128 d; Q4_0:
// m = -8 d). d * u has at most 19 significant bits, so the fused multiply-add rounds as gguf's d * q + m does.
// A 32-bit lane holds 8 or 4 successive u of one output.
template <int BITS, int OFFSET, bool MINIMUM>
struct StoreBlocks {
    static constexpr int scales = PANEL * 2 * (1 + MINIMUM), words = 32 / BITS;  // inputs in a word
    static constexpr int unit = BLOCK, bytes = scales + BLOCK * PANEL * BITS / 8;
    static constexpr int source = 2 + 2 * MINIMUM + BLOCK * BITS / 8;

    // With 512 bits digits become numbers without a conversion, which would take the multiply-adds' place: four bits
    // choose one of sixteen floats, whatever bits stand above them; eight bits, put into the fraction of 256, make
    // 256 + u. d * (256 + u) - 384 d is d * (u - 128) exactly, as all terms fit into 24 bits.
    static constexpr int raised = WIDE == 16 && BITS == 8 ? 256 : 0;
    static_assert(!raised || !MINIMUM);
    const uint8_t* p;
    wf d[VECTORS], m[VECTORS];

    explicit StoreBlocks(const uint8_t* at) : p(at + scales) {
        for (int v = 0; v < VECTORS; v++) {
            d[v] = half(at + v * WIDE * 2);
            m[v] = MINIMUM ? half(at + PANEL * 2 + v * WIDE * 2) : d[v] * splat<wf>(-OFFSET - raised);
        }
    }

    wf get(int turn, int i, int v) const {
        const wu word = load<wu>(p + ((turn / words + i / words) * PANEL + v * WIDE) * 4);
        const int part = i % words;
#if defined(__AVX512F__)
        if constexpr (BITS == 4) {
            const wi shifted = (wi)(word >> (part * BITS));
            const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            return fma((wf)_mm512_permutexvar_ps((__m512i)shifted, numbers), d[v], m[v]);
        }
        constexpr int place = 15;  // of the fraction's bit that is worth 1 beside 256
        const wu shifted = part * BITS < place ? word << (place - part * BITS) : word >> (part * BITS - place);
        constexpr int pick_or = 0xea;  // (first & second) | third
        return fma((wf)_mm512_ternarylogic_epi32((__m512i)shifted, _mm512_set1_epi32(255 << place),
                                                 _mm512_castps_si512(_mm512_set1_ps(256)), pick_or),
                   d[v], m[v]);
#else
        constexpr uint32_t mask = (1u << BITS) - 1;
        const wu u = part == words - 1 ? word >> (32 - BITS) : word >> (part * BITS) & mask;
        return scale(__builtin_convertvector((wi)u, wf), d[v], m[v]);
#endif
    }

    static void write(uint8_t* to, const uint8_t* row, int k, int, int lane) {
        const uint8_t* block = row + (size_t)(k / BLOCK) * source;
        std::memcpy(to + lane * 2, block, 2);
        if (MINIMUM) std::memcpy(to + (PANEL + lane) * 2, block + 2, 2);
        const uint8_t* q = block + 2 + 2 * MINIMUM;
        for (int i = 0; i < BLOCK; i += words) {
            uint32_t word = 0;
            for (int j = 0; j < words; j++) {
                int e = i + j;
                uint32_t u = BITS == 8 ? (uint8_t)(q[e] + OFFSET) : e < 16 ? q[e] & 15 : q[e - 16] >> 4;
                word |= u << (j * BITS);
            }
            std::memcpy(to + scales + (i / words * PANEL + lane) * 4, &word, 4);
        }
    }
};

template <class Run>
auto with_storage(int32_t kind, Run run) {
    switch (kind) {
        case BF16: return run.template operator()<StoreBF16>();
        case Q8_0: return run.template operator()<StoreBlocks<8, 128, false>>();
        case Q4_0: return run.template operator()<StoreBlocks<4, 8, false>>();
        case Q4_1: return run.template operator()<StoreBlocks<4, 0, true>>();
        default: return run.template operator()<StoreF32>();
    }
}

// `count` inputs of a panel as floats, as StoreF32 has them.
template <class S>
void expand(const uint8_t* w, int count, float* to) {
    for (int k = 0; k < count; k += S::unit, w += S::bytes) {
        const S unit(w);
        for (int turn = 0; turn < S::unit; turn += TURN)
#pragma GCC unroll 8
            for (int i = 0; i < TURN; i++)
                for (int v = 0; v < VECTORS; v++)
                    store(to + (size_t)(k + turn + i) * PANEL + v * WIDE, unit.get(turn, i, v));
    }
}

}  // namespace paceline::PACELINE_ISA
