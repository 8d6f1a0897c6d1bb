// GGUF's K-quants: blocks of 256 inputs, each with a scale (and a minimum) of half precision for the small whole ones
// of its parts.
#pragma once

#include "storage.h"

namespace paceline::PACELINE_ISA {

// The file's blocks: number of input i, and what part `part` of the inputs has. ggml packs a pair of scale and minimum,
// 6 bits each, into 12 bits.
struct FileQ4K {
    static constexpr int bits = 4, offset = 0, source = 144, d = 0;
    static constexpr bool minimum = true;
    static uint8_t number(const uint8_t* from, int i) { return nibble(from + 16, i); }
    static int8_t scale(const uint8_t* from, int part) { return of_pair(from + 4, part, 0); }
    static int8_t least(const uint8_t* from, int part) { return of_pair(from + 4, part, 4); }

    static uint8_t nibble(const uint8_t* q, int i) { return q[i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15; }
    static int8_t of_pair(const uint8_t* pairs, int part, int which) {
        if (part < 4) return pairs[which + part] & 63;
        return (pairs[8 + part - 4] >> which & 15) | pairs[which + part - 4] >> 6 << 4;
    }
};

struct FileQ5K : FileQ4K {
    static constexpr int bits = 5, source = 176;
    static uint8_t number(const uint8_t* from, int i) {
        return nibble(from + 48, i) | (from[16 + i % 32] >> (i / 32) & 1) << 4;
    }
};

struct FileQ6K {
    static constexpr int bits = 6, offset = 32, source = 210, d = 208;
    static constexpr bool minimum = false;
    static uint8_t number(const uint8_t* from, int i) {
        const int half = i / 128, quarter = i % 128 / 32, at = i % 32;
        const int low = from[half * 64 + quarter % 2 * 32 + at] >> (quarter / 2 * 4) & 15;
        return low | (from[128 + half * 32 + at] >> (quarter * 2) & 3) << 4;
    }
    static int8_t scale(const uint8_t* from, int part) { return from[192 + part]; }
    static int8_t least(const uint8_t*, int) { return 0; }
};

// w = (d * scale) * u - (dmin * least), or (d * scale) * (u - offset). The products in brackets are exact, 11 bits by 7,
// and so are those with u or u - offset, 17 bits by 5 or 18 by 5 (32 = 2^5): one rounding is left, that of gguf's
// difference, which the fused multiply-add has too. Scales take a byte each, 2 or 3 % more than in the file.
template <class F>
struct StoreK {
    using D = Digits<F::bits>;
    static constexpr int unit = D::unit, block = 256, parts = block / unit;
    static constexpr int halves = PANEL * 2 * (1 + F::minimum), scales = parts * PANEL;
    static constexpr int head = halves + scales * (1 + F::minimum), bytes = head + parts * D::bytes;
    static_assert(!(D::raised && F::minimum));
    D digits;
    wf d[VECTORS], m[VECTORS];

    StoreK(const uint8_t* panel, int k) {
        const uint8_t* at = panel + (size_t)(k / block) * bytes;
        const int part = k % block / unit;
        digits.p = at + head + part * D::bytes;
        for (int v = 0; v < VECTORS; v++) {
            const uint8_t* small = at + halves + part * PANEL + v * WIDE;
            d[v] = half(at + v * WIDE * 2) * whole(small);
            m[v] = F::minimum ? half(at + PANEL * 2 + v * WIDE * 2) * whole(small + scales)
                              : d[v] * splat<wf>(-F::offset - D::raised);
        }
    }

    wf get(int turn, int i, int v) const { return scale(digits.number(turn, i, v), d[v], m[v]); }

    static void write(uint8_t* to, const uint8_t* row, int k, int, int lane) {
        const uint8_t* from = row + (size_t)(k / block) * F::source;
        std::memcpy(to + lane * 2, from + F::d, 2);
        if (F::minimum) {
            const uint8_t negative[] = {from[2], (uint8_t)(from[3] ^ 0x80)};
            std::memcpy(to + (PANEL + lane) * 2, negative, 2);
        }
        for (int part = 0; part < parts; part++) {
            uint8_t* small = to + halves + part * PANEL + lane;
            small[0] = F::scale(from, part);
            if (F::minimum) small[scales] = F::least(from, part);
            uint8_t numbers[unit];
            for (int i = 0; i < unit; i++) numbers[i] = F::number(from, part * unit + i);
            D::write(to + head + part * D::bytes, numbers, lane);
        }
    }
};

}  // namespace paceline::PACELINE_ISA
