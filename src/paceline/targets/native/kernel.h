// The micro-kernel of a matrix product, in one storage, and all that gemm.cpp needs to know of a storage.
#pragma once

#include <utility>

#include "formats.h"
#include "storage.h"

namespace paceline::PACELINE_ISA {
namespace {

// Of a panel, in bytes: so far in front of what is read, one or two tokens bring weights into the L1 cache. More tokens
// take so long that the processor does it.
constexpr int CLOSE = 2560;

// acc[token][16 P outputs] += x * w over `count` inputs, M tokens x P panels that lie `panel_bytes` apart.
template <class S, int M, int P>
void kernel(const uint8_t* w, size_t panel_bytes, const float* x, int ldx, int count, float* acc, Ahead ahead) {
    wf a[M * P * VECTORS];
#pragma GCC unroll 64
    for (int i = 0; i < M * P * VECTORS; i++) a[i] = load<wf>(acc + i * WIDE);
    for (int k = 0; k < count; w += S::bytes)
        for (int part = 0; part < S::block; part += S::unit, k += S::unit) {
            const int begin = S::bytes * part / S::block, end = S::bytes * (part + S::unit) / S::block;
            const uint8_t* numbers[P];
            wf d[P * VECTORS], m[P * VECTORS];  // as arrays of structures gcc 12 stores them, and `a`, at every turn
#pragma GCC unroll 4
            for (int panel = 0; panel < P; panel++) {
                const uint8_t* at = w + panel * panel_bytes;
                for (int line = begin; M <= 2 && line < end; line += 64)
                    __builtin_prefetch(at + CLOSE + line, 0, 3);
                numbers[panel] = S::unit_at(at, part, d + panel * VECTORS, m + panel * VECTORS);
            }
            for (int turn = 0; turn < S::unit; turn += TURN) {
                ahead.turn();
#pragma GCC unroll 8
                for (int i = 0; i < TURN; i++) {
                    wf weights[P * VECTORS];
#pragma GCC unroll 8
                    for (int at = 0; at < P * VECTORS; at++)
                        weights[at] = keep(S::get(numbers[at / VECTORS], d[at], m[at], turn, i, at % VECTORS));
#pragma GCC unroll 16
                    for (int token = 0; token < M; token++)
                        add_products<P * VECTORS>(a + token * P * VECTORS, x + (size_t)token * ldx + k + turn + i,
                                                  weights);
                }
            }
        }
#pragma GCC unroll 64
    for (int i = 0; i < M * P * VECTORS; i++) store(acc + i * WIDE, a[i]);
}

// `count` inputs of a panel from input k on, as floats, as StoreF32 has them.
template <class S>
void expand(const uint8_t* panel, int k, int count, float* to) {
    for (const int end = k + count; k < end; k += S::unit, to += S::unit * PANEL) {
        wf d[VECTORS], m[VECTORS];
        const uint8_t* numbers = S::unit_at(panel + (size_t)(k / S::block) * S::bytes, k % S::block, d, m);
        for (int turn = 0; turn < S::unit; turn += TURN)
#pragma GCC unroll 8
            for (int i = 0; i < TURN; i++)
                for (int v = 0; v < VECTORS; v++)
                    store(to + (turn + i) * PANEL + v * WIDE, S::get(numbers, d[v], m[v], turn, i, v));
    }
}

template <class S>
constexpr Format format_of = []<size_t... I>(std::index_sequence<I...>) {
    return Format{S::block, S::bytes,  S::unit,
                  S::write, expand<S>, {nullptr, kernel<S, I + 1, TILING.panels[I + 1]>...}};
}(std::make_index_sequence<TILING.largest()>());

}  // namespace
}  // namespace paceline::PACELINE_ISA
