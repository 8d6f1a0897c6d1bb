// The micro-kernel of products with inputs of 8 bits.
//
// Of a unit of inputs that share d and m, sum (d u + m) (scale q) = scale (d sum(u q) + m sum(q)), where both sums are
// of whole numbers, exact in any order. What is rounded is the same on every instruction set: d sum(u q), then with
// m sum(q), then the total, unit after unit.
#pragma once

#include <utility>

#include "int8.h"
#include "storage.h"

namespace paceline::PACELINE_ISA {
namespace {

// sum((u - less) q) of a unit, four inputs at a time: `add`, up to `most` of them, then `total`.
#if defined(__AVX2__) && !defined(__AVX512F__)
// Products of bytes, added in pairs into 16 bits, as many as fit. Eight bits are taken less 128, with their sign moved
// to the inputs.
template <int BITS>
struct Products {
    static constexpr int most = BITS == 8 ? 1 : BITS == 6 ? 2 : BITS == 5 ? 4 : 8;  // 127 (2^BITS - 1) 2 most < 2^15
    static constexpr int less = BITS == 8 ? 128 : 0;

    template <int N>
    static void add(wi* sums, const wu* fours, const int8_t* q) {
        int32_t together;
        std::memcpy(&together, q, 4);
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) {
            __m256i inputs = _mm256_set1_epi32(together), digits = (__m256i)fours[i];
            if (less) {
                digits = _mm256_xor_si256(digits, _mm256_set1_epi8((char)less));
                inputs = _mm256_sign_epi8(inputs, digits);
                digits = _mm256_abs_epi8(digits);
            }
            sums[i] = (wi)_mm256_add_epi16((__m256i)sums[i], _mm256_maddubs_epi16(digits, inputs));
        }
    }
    static wi total(wi sum) { return (wi)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)); }
};
#else
template <int BITS>
struct Products {
    static constexpr int most = BLOCK, less = 0;

    // The inputs come into a register where they serve several vectors, as in add_products.
    template <int N>
    static void add(wi* sums, const wu* fours, const int8_t* q) {
#if defined(__AVX512F__)  // VNNI has an instruction for it; without it this code is not reached, see int8.cpp
        if constexpr (N == 1) {
            asm("vpdpbusd %1%{1to16%}, %2, %0" : "+v"(sums[0]) : "m"(*(const int32_t*)q), "v"(fours[0]));
            return;
        }
        const wi all = keep((wi)splat<wf>(*(const float*)q));
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) asm("vpdpbusd %1, %2, %0" : "+v"(sums[i]) : "v"(all), "v"(fours[i]));
#else
        for (int i = 0; i < N; i++)
            for (int j = 0; j < 4; j++) sums[i] += (wi)(fours[i] >> (8 * j) & 255u) * (int32_t)q[j];
#endif
    }
    static wi total(wi sum) { return sum; }
};
#endif

// Where something of M tokens lies: an address for every three, from which the others are one or two rows away.
template <int M>
struct Rows {
    Rows(const void* first, size_t row) : row_(row) {
#pragma GCC unroll 8
        for (int i = 0; i < (M + 2) / 3; i++) {
            at_[i] = (const int8_t*)first + 3 * i * row;
            asm("" : "+r"(at_[i]));  // left alone, gcc computes every token's
        }
    }
    const int8_t* operator[](int token) const { return at_[token / 3] + token % 3 * row_; }

  private:
    const int8_t* at_[(M + 2) / 3];
    const size_t row_;
};

template <class S, int M, int P>
void byte_kernel(const uint8_t* w, size_t panel_bytes, const float* x, int ldx, int inputs, float* acc, int stride,
                 Ahead ahead) {
    using D = typename S::D;
    using Dot = Products<D::bits>;
    const size_t row = ldx * sizeof(float);
    constexpr int order = D::stride == 4 ? 2 : D::stride - 1, count = M * P * VECTORS;
    constexpr int most = std::min(Dot::most, S::unit / 4);
    wf a[count] = {};
    for (int k = 0; k < inputs; w += S::bytes)
        for (int part = 0; part < S::block; part += S::unit, k += S::unit) {
            ahead.turn();
            const auto* block = (const Rounded*)(x + k / BLOCK * BLOCK);
            const Rows<M> q(block->by[order] + k % BLOCK, row), scales(&block->scale, row);
            const Rows<M> all(block->sums + (S::unit == BLOCK ? 2 : k % BLOCK / S::unit), row);
            const uint8_t* numbers[P];
            wf d[P * VECTORS], m[P * VECTORS];
#pragma GCC unroll 4
            for (int panel = 0; panel < P; panel++)
                numbers[panel] = S::unit_at(w + panel * panel_bytes, part, d + panel * VECTORS, m + panel * VECTORS);
            wi totals[count] = {};
#pragma GCC unroll 8
            for (int turn = 0; turn < S::unit / 4; turn += most) {
                wi sums[count] = {};
#pragma GCC unroll 8
                for (int group = turn; group < turn + most; group++) {
                    wu fours[P * VECTORS];
#pragma GCC unroll 8
                    for (int i = 0; i < P * VECTORS; i++)
                        fours[i] = keep(D::four(numbers[i / VECTORS], group, i % VECTORS));
#pragma GCC unroll 16
                    for (int token = 0; token < M; token++)
                        Dot::template add<P * VECTORS>(sums + token * P * VECTORS, fours, q[token] + group * 4);
                }
#pragma GCC unroll 64
                for (int i = 0; i < count; i++) totals[i] += Dot::total(sums[i]);
            }
#pragma GCC unroll 16
            for (int token = 0; token < M; token++)
#pragma GCC unroll 8
                for (int i = 0; i < P * VECTORS; i++) {
                    const auto of = [&](const Rows<M>& field) { return splat<wf>(*(const float*)field[token]); };
                    wf& sum = a[token * P * VECTORS + i];
                    const wf least = D::raised ? fma(d[i], splat<wf>(D::raised), m[i]) : m[i];
                    wf products = __builtin_convertvector(totals[token * P * VECTORS + i], wf);
                    if (Dot::less) products += splat<wf>(Dot::less) * of(all);
                    sum = fma(of(scales), fma(least, of(all), d[i] * products), sum);
                }
        }
#pragma GCC unroll 16
    for (int token = 0; token < M; token++)
#pragma GCC unroll 8
        for (int i = 0; i < P * VECTORS; i++)
            store(acc + (size_t)token * stride + i * WIDE, a[token * P * VECTORS + i]);
}

template <class S>
constexpr ByteKernels byte_kernels_of = []<size_t... I>(std::index_sequence<I...>) {
    return ByteKernels{{nullptr, byte_kernel<S, I + 1, 1>...}, {nullptr, byte_kernel<S, I + 1, BYTE_PANELS[I + 1]>...}};
}(std::make_index_sequence<BYTE_TOKENS>());

}  // namespace
}  // namespace paceline::PACELINE_ISA
