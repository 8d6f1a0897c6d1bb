// Matrix products y[token][output] = sum_k x[token][k] * w[output][k] for one kind of storage, and what else depends on
// it; gemm.cpp spreads them over threads.
//
// Blocking. A matrix is packed into panels of 16 outputs: for each k the 16 weights lie side by side, so that lanes are
// outputs and every output is ONE chain of fused multiply-adds over k = 0, 1, 2, ...: the same bits at any width, on
// any instruction set, in any storage that represents the same weights. The micro-kernel keeps a tile of tokens x
// panels in registers (tiles.h says which). A job is one tile's panels for up to 96 tokens, so that weights stream
// from memory once, while those of the thread's next job are prefetched:
//   narrow: unpacked in registers, each weight used for all tokens of a tile;
//   wide:   some inputs at a time, unpacked to floats in the L1 cache first, over all tiles; accumulators are carried
//           from one such piece to the next, which leaves the chain as it is.
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "formats.h"
#include "storage.h"
#include "tiles.h"

namespace paceline::PACELINE_ISA {
namespace {

struct Ahead {  // what a kernel prefetches: `step` bytes a unit, from `at` on
    const uint8_t* at;
    int step;
};

// acc[token][16 P outputs] += x * w over `count` inputs, M tokens x P panels that lie `panel_bytes` apart.
template <class S, int M, int P>
void kernel(const uint8_t* w, size_t panel_bytes, const float* x, int ldx, int count, float* acc, Ahead ahead) {
    wf a[M * P * VECTORS];
#pragma GCC unroll 64
    for (int i = 0; i < M * P * VECTORS; i++) a[i] = load<wf>(acc + i * WIDE);
    for (int k = 0; k < count; k += S::unit, ahead.at += ahead.step) {
        for (int line = 0; line < ahead.step; line += 64) __builtin_prefetch(ahead.at + line, 0, 2);
        const auto units = [&]<size_t... I>(std::index_sequence<I...>) {
            return std::array<S, P>{S(w + I * panel_bytes, k)...};
        }(std::make_index_sequence<P>());
        for (int turn = 0; turn < S::unit; turn += TURN) {
#pragma GCC unroll 8
            for (int i = 0; i < TURN; i++) {
#pragma GCC unroll 4
                for (int panel = 0; panel < P; panel++) {
                    wf weights[VECTORS];
#pragma GCC unroll 2
                    for (int v = 0; v < VECTORS; v++) weights[v] = keep(units[panel].get(turn, i, v));
#pragma GCC unroll 16
                    for (int m = 0; m < M; m++) {
                        const float* value = x + (size_t)m * ldx + k + turn + i;
                        wf* sums = a + (m * P + panel) * VECTORS;
#pragma GCC unroll 2
                        for (int v = 0; v < VECTORS; v++) add_product(sums[v], value, weights[v]);
                    }
                }
            }
        }
    }
#pragma GCC unroll 64
    for (int i = 0; i < M * P * VECTORS; i++) store(acc + i * WIDE, a[i]);
}

using Kernel = void (*)(const uint8_t*, size_t, const float*, int, int, float*, Ahead);
using Column = std::array<Kernel, MOST + 1>;  // by tokens

// Tiles of one panel, and of as many as the tiling says: `panels[tokens]`.
template <class S>
constexpr Column single = []<size_t... I>(std::index_sequence<I...>) {
    return Column{nullptr, kernel<S, I + 1, 1>...};
}(std::make_index_sequence<TILING.largest()>());
template <class S>
constexpr Column several = []<size_t... I>(std::index_sequence<I...>) {
    return Column{nullptr, kernel<S, I + 1, TILING.panels[I + 1]>...};
}(std::make_index_sequence<TILING.largest()>());
template <int P>
constexpr Column on_floats = []<size_t... I>(std::index_sequence<I...>) {
    return Column{nullptr, kernel<StoreF32, I + 1, P>...};
}(std::make_index_sequence<TILING.tokens>());

template <class S>
class Product {
  public:
    explicit Product(const Input& in) : x_(in.x), ldx_(in.ldx), tokens_(in.tokens), inputs_(in.inputs) {}

    static int together(int tokens) {
        return tokens <= TILING.fused ? TILING.panels[tiles(tokens, true).largest()] : TILING.together;
    }

    void compute(const Job& job, float* acc) const {
        std::fill_n(acc, (size_t)job.tokens * job.panels * PANEL, 0.0f);
        if (fused())
            in_registers(job, acc);
        else
            by_pieces(job, acc);
    }

  private:
    bool fused() const { return tokens_ <= TILING.fused; }
    static Cut tiles(int n, bool fused) { return Cut(n, fused ? TILING.largest() : TILING.tokens); }

    void in_registers(const Job& job, float* acc) const {
        const Cut cut = tiles(job.tokens, true);
        const Column& kernels = job.panels > 1 ? several<S> : single<S>;
        for (int tile = 0; tile < cut.count; tile++) {
            const int t = cut(tile), m = cut(tile + 1) - t;
            const float* x = x_ + (size_t)(job.first + t) * ldx_;
            float* to = acc + t * job.panels * PANEL;
            const Ahead ahead = {job.next, tile ? 0 : job.panels * bytes(S::unit)};
            if (job.panels == 1 || TILING.panels[m] == job.panels)
                kernels[m](job.weights, panel_bytes_, x, ldx_, inputs_, to, ahead);
            else
                by_panel(job, x, m, to, ahead);
        }
    }

    // A number of panels that no tile has: the last ones of a matrix, or a tile with one token less than the others.
    void by_panel(const Job& job, const float* x, int m, float* acc, Ahead ahead) const {
        float one[MOST * PANEL];
        for (int i = 0; i < job.panels; i++, ahead.step = 0) {
            std::fill_n(one, m * PANEL, 0.0f);
            single<S>[m](job.weights + i * panel_bytes_, 0, x, ldx_, inputs_, one, ahead);
            for (int t = 0; t < m; t++) std::copy_n(one + t * PANEL, PANEL, acc + (t * job.panels + i) * PANEL);
        }
    }

    void by_pieces(const Job& job, float* acc) const {
        constexpr bool plain = std::is_same_v<S, StoreF32>;
        alignas(64) float floats[plain ? 1 : TILING.together * TILING.piece * PANEL];
        const Cut cut = tiles(job.tokens, false), pieces(inputs_ / BLOCK, TILING.piece / BLOCK);
        const Column& kernels = job.panels > 1 ? on_floats<TILING.together> : on_floats<1>;
        const uint8_t* next = job.next;
        for (int i = 0; i < pieces.count; i++) {
            const int k = pieces(i) * BLOCK, piece = pieces(i + 1) * BLOCK - k;
            for (int p = 0; p < job.panels && !plain; p++)
                expand<S>(job.weights + p * panel_bytes_, k, piece, floats + p * TILING.piece * PANEL);
            const uint8_t* w = plain ? job.weights + (size_t)k * PANEL * sizeof(float) : (const uint8_t*)floats;
            const size_t apart = plain ? panel_bytes_ : TILING.piece * PANEL * sizeof(float);
            const int units = piece / StoreF32::unit;
            const int step = round_up(job.panels * bytes(piece) / (units * cut.count), 64);
            for (int tile = 0; tile < cut.count; tile++, next += step * units) {
                const int t = cut(tile), m = cut(tile + 1) - t;
                kernels[m](w, apart, x_ + (size_t)(job.first + t) * ldx_ + k, ldx_, piece,
                           acc + t * job.panels * PANEL, {next, step});
            }
        }
    }

    static constexpr int bytes(int inputs) { return (int64_t)inputs * S::bytes / S::block; }  // of a panel

    const float* x_;
    const int ldx_, tokens_, inputs_;
    const size_t panel_bytes_ = (size_t)(inputs_ / S::block) * S::bytes;
};

template <class S>
constexpr Format format_of = {
    S::block, S::bytes, S::write, expand<S>, Product<S>::together,
    [](const Input& in, const Job& job, float* acc) { Product<S>(in).compute(job, acc); }};

}  // namespace
}  // namespace paceline::PACELINE_ISA
