// GGUF's K-quants: blocks of 256 inputs in parts of 32 or 16. A block has a scale of half precision, d, and maybe one of
// minima, dmin; a part has whole numbers, which these multiply.
#pragma once

#include "storage.h"

namespace paceline::PACELINE_ISA {

// The blocks in the file: where d is (dmin follows), the number of input i, and scale and minimum of a part of `unit`
// inputs. `bits` are those of a number here: Q3_K's 3 take 4.
struct FileQ2K {
    static constexpr int bits = 2, unit = 16, offset = 0, source = 84, d = 80;
    static constexpr bool minimum = true;
    static uint8_t number(const uint8_t* from, int i) { return quarter(from + 16, i); }
    static int8_t scale(const uint8_t* from, int part) { return from[part] & 15; }
    static int8_t least(const uint8_t* from, int part) { return from[part] >> 4; }

    static uint8_t quarter(const uint8_t* q, int i) { return q[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3; }
};

struct FileQ3K {
    static constexpr int bits = 4, unit = 16, offset = 4, source = 110, d = 108;
    static constexpr bool minimum = false;
    static uint8_t number(const uint8_t* from, int i) {
        return FileQ2K::quarter(from + 32, i) | (from[i % 32] >> (i / 32) & 1) << 2;
    }
    static int8_t scale(const uint8_t* from, int part) {
        const int low = from[96 + part % 8] >> (part / 8 * 4) & 15, high = from[104 + part % 4] >> (part / 4 * 2) & 3;
        return (low | high << 4) - 32;
    }
    static int8_t least(const uint8_t*, int) { return 0; }
};

struct FileQ4K {
    static constexpr int bits = 4, unit = 32, offset = 0, source = 144, d = 0;
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
    static constexpr int bits = 6, unit = 16, offset = 32, source = 210, d = 208;
    static constexpr bool minimum = false;
    static uint8_t number(const uint8_t* from, int i) {
        const int half = i / 128, quarter = i % 128 / 32, at = i % 32;
        const int low = from[half * 64 + quarter % 2 * 32 + at] >> (quarter / 2 * 4) & 15;
        return low | (from[128 + half * 32 + at] >> (quarter * 2) & 3) << 4;
    }
    static int8_t scale(const uint8_t* from, int part) { return from[192 + part]; }
    static int8_t least(const uint8_t*, int) { return 0; }
};

// w = (d * scale) * u - (dmin * least), or (d * scale) * (u - offset). d and dmin have 11 significant bits, scale and
// least 6 (7 with a sign): the products in brackets are exact, and so are those with u, of 5 bits, and u - offset, of 5
// (32 is 2^5). One rounding is left, that of gguf's difference, which the fused multiply-add has too; without a minimum
// there is none. Small scales take a byte each: up to 3 % more than in the file, of Q2_K 19 %.
template <class F>
struct StoreK {
    using D = Digits<F::bits, F::unit>;
    static constexpr int unit = F::unit, block = 256, parts = block / unit;
    static constexpr int halves = PANEL * 2 * (1 + F::minimum), scales = parts * PANEL;
    static constexpr int head = halves + scales * (1 + F::minimum), bytes = head + parts * D::bytes;
    static_assert(!(D::raised && F::minimum));

    static const uint8_t* unit_at(const uint8_t* at, int k, wf* d, wf* m) {
        const int part = k / unit;
        for (int v = 0; v < VECTORS; v++) {
            const uint8_t* small = at + halves + part * PANEL + v * WIDE;
            d[v] = half(at + v * WIDE * 2) * whole(small);
            m[v] = F::minimum ? half(at + PANEL * 2 + v * WIDE * 2) * whole(small + scales)
                              : d[v] * splat<wf>(-F::offset - D::raised);
        }
        return at + head + part * D::bytes;
    }

    static wf get(const uint8_t* p, const wf& d, const wf& m, int turn, int i, int v) {
        return scale(D::number(p, turn, i, v), d, m);
    }

    static void write(uint8_t* to, const uint8_t* row, int k, int, int lane) {
        const uint8_t* from = row + (size_t)(k / block) * F::source;
        std::memcpy(to + lane * 2, from + F::d, 2);
        if (F::minimum) {
            const uint8_t negative[] = {from[F::d + 2], (uint8_t)(from[F::d + 3] ^ 0x80)};
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
