// How the weights of a panel (16 outputs) are stored: `block` inputs lie in `bytes` bytes, the same bytes for every
// instruction set. unit_at(at, k, d, m) finds the numbers of `unit` inputs from input k of the block `at` on, and the
// scales d and minima m that they share, for each vector of outputs. get() then gives the weights of input turn + i of
// the unit for vector v, whose scale and minimum it is told. `turn` is a multiple of TURN, and i below it: what the
// compiler unrolls. write() puts `count` inputs of a row, from input k on, into the block `to` as output `lane`.
#pragma once

#include "digits.h"

namespace paceline::PACELINE_ISA {

struct StoreF32 {
    static constexpr int unit = 8, block = unit, bytes = unit * PANEL * 4;
    static const uint8_t* unit_at(const uint8_t* at, int, wf*, wf*) { return at; }
    static wf get(const uint8_t* p, const wf&, const wf&, int turn, int i, int v) {
        return load<wf>(p + ((turn + i) * PANEL + v * WIDE) * 4);
    }

    static void write(uint8_t* to, const uint8_t* row, int k, int count, int lane) {
        for (int i = 0; i < count; i++) std::memcpy(to + (i * PANEL + lane) * 4, row + (k + i) * 4, 4);
    }
};

struct StoreBF16 {  // a 32-bit lane holds the weights of two inputs, the first above: bfloat16.cpp says why
    static constexpr int unit = 8, block = unit, bytes = unit * PANEL * 2;
    static const uint8_t* unit_at(const uint8_t* at, int, wf*, wf*) { return at; }
    static wf get(const uint8_t* p, const wf&, const wf&, int turn, int i, int v) {
        const wu pair = load<wu>(p + ((turn / 2 + i / 2) * PANEL + v * WIDE) * 4);
        return (wf)(i % 2 ? pair << 16 : pair & 0xffff0000u);
    }

    static void write(uint8_t* to, const uint8_t* row, int k, int count, int lane) {
        for (int i = 0; i < count; i++)
            std::memcpy(to + (i / 2 * PANEL + lane) * 4 + (1 - i % 2) * 2, row + (k + i) * 2, 2);
    }
};

struct StoreF16 {
    static constexpr int unit = 8, block = unit, bytes = unit * PANEL * 2;
    static const uint8_t* unit_at(const uint8_t* at, int, wf*, wf*) { return at; }
    static wf get(const uint8_t* p, const wf&, const wf&, int turn, int i, int v) {
        return half(p + ((turn + i) * PANEL + v * WIDE) * 2);
    }

    static void write(uint8_t* to, const uint8_t* row, int k, int count, int lane) {
        for (int i = 0; i < count; i++) std::memcpy(to + (i * PANEL + lane) * 2, row + (k + i) * 2, 2);
    }
};

// GGUF's blocks of 32 inputs are all w = d * u + m with unsigned u (Q8_0: u = q + 128, m = -128 d; Q4_0: m = -8 d;
// Q5_0: m = -16 d). d has 11 significant bits, so d * u is exact, and the fused multiply-add rounds as gguf's d * q + m
// does. With digits that come as raised + u (never beside a minimum) m takes d * raised away as well, and nothing is
// rounded: all terms fit into 24 bits.
//
// NEAR: m less d * Digits::lift is exact, too, as without a minimum, or where all minima are near enough to their scales
// (`is_near`). Then half of the digits of 4 bits may come lifted, which takes less (AVX-512).
template <int BITS, int OFFSET, bool MINIMUM, bool NEAR = !MINIMUM>
struct StoreBlocks {
    using D = Digits<BITS, BLOCK>;
    static constexpr int unit = BLOCK, block = BLOCK, scales = PANEL * 2 * (1 + MINIMUM), bytes = scales + D::bytes;
    static constexpr int fields = 2 + 2 * MINIMUM, source = fields + BLOCK * BITS / 8;  // bytes of the file's block
    static_assert(!(D::raised && MINIMUM));

    static const uint8_t* unit_at(const uint8_t* at, int, wf* d, wf* m) {
        for (int v = 0; v < VECTORS; v++) {
            d[v] = half(at + v * WIDE * 2);
            m[v] = MINIMUM ? half(at + PANEL * 2 + v * WIDE * 2) : d[v] * splat<wf>(-OFFSET - D::raised);
        }
        return at + scales;
    }

    static wf get(const uint8_t* p, const wf& d, const wf& m, int turn, int i, int v) {
        if constexpr (NEAR && BITS == 4 && WIDE == 16)
            if (i % 2) return scale(D::lifted(p, turn, i, v), d, fma(splat<wf>(-D::lift), d, m));
        return scale(D::number(p, turn, i, v), d, m);
    }

    // A block with a minimum, as in the file.
    static bool is_near(const uint8_t* from) {
        alignas(64) uint8_t halves[2 * PANEL] = {};
        std::memcpy(halves, from, fields);
        const wf numbers = half(halves);
        const double exact = (double)numbers[1] - (double)numbers[0] * D::lift;
        return (double)(float)exact == exact;
    }

    static void write(uint8_t* to, const uint8_t* row, int k, int, int lane) {
        const uint8_t* from = row + (size_t)(k / block) * source;
        for (int field = 0; field < fields; field += 2) std::memcpy(to + field * PANEL + lane * 2, from + field, 2);
        const uint8_t* q = from + source - BLOCK * D::low / 8;
        uint32_t above = 0;
        if (D::high) std::memcpy(&above, from + fields, 4);
        uint8_t numbers[BLOCK];
        for (int i = 0; i < BLOCK; i++)
            numbers[i] = BITS == 8 ? q[i] + OFFSET : (q[i % 16] >> (i / 16 * 4) & 15) | (above >> i & 1) << 4;
        D::write(to + scales, numbers, lane);
    }
};

}  // namespace paceline::PACELINE_ISA
