// Matrix products y[token][output] = sum_k x[token][k] * w[output][k], for 1 to a few hundred tokens.
//
// Blocking. A matrix is packed into panels of 16 outputs: for each k the 16 weights lie side by side, so that lanes are
// outputs and every output is ONE chain of fused multiply-adds over k = 0, 1, 2, ...: the same bits at any width, on
// any instruction set, in any storage that represents the same weights. The micro-kernel keeps a tile of tokens x
// panels in registers (tiles.h says which). A job is one tile's panels for up to 96 tokens, so that weights stream
// from memory once, while those of the thread's next job are prefetched:
//   narrow: unpacked in registers, each weight used for all tokens of a tile;
//   wide:   some inputs at a time, unpacked to floats in the L1 cache first, over all tiles; accumulators are carried
//           from one such piece to the next, which leaves the chain as it is.
#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "kernels.h"
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
    for (int k = 0; k < count; k += S::unit, w += S::bytes, ahead.at += ahead.step) {
        for (int line = 0; line < ahead.step; line += 64) __builtin_prefetch(ahead.at + line, 0, 2);
        const auto units = [&]<size_t... I>(std::index_sequence<I...>) {
            return std::array<S, P>{S(w + I * panel_bytes)...};
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

template <class V>
inline V silu(V x) {
    return x / (splat<V>(1.0f) + exp(-x));
}

// One token's 16 sums of panel `panel` to where they belong.
void finish(const Matrix& w, int panel, const float* acc, float* y, Epilogue epilogue) {
    const int first = panel * PANEL, count = std::min(PANEL, w.outputs - first);
    float sums[PANEL];
    for (int i = 0; i < PANEL; i++) sums[i] = acc[i];
    if (w.bias)
        for (int i = 0; i < count; i++) sums[i] += w.bias[first + i];
    if (epilogue == SWIGLU) return store(y + first / 2, silu(load<vf>(sums)) * load<vf>(sums + PANEL / 2));
    y += first;
    const auto put = [&](int n) {
        for (int i = 0; i < n; i++) y[i] = epilogue == ADD ? y[i] + sums[i] : sums[i];
    };
    if (count == PANEL)
        put(PANEL);  // a constant, for the compiler
    else
        put(count);
}

template <class S>
class Product {
  public:
    Product(const Matrix& w, const float* x, int ldx, int tokens) : w_(w), x_(x), ldx_(ldx), tokens_(tokens) {}

    // Panels of a job.
    int together() const { return fused() ? TILING.panels[tiles(tokens_).largest()] : TILING.together; }

    // acc[token][panels * 16] = sums of tokens from .. from + n - 1; `next` are the weights to prefetch.
    void compute(int panel, int panels, int from, int n, float* acc, const uint8_t* next) const {
        std::fill_n(acc, (size_t)n * panels * PANEL, 0.0f);
        if (fused())
            in_registers(panel, panels, from, n, acc, next);
        else
            by_pieces(panel, panels, from, n, acc, next);
    }

    const uint8_t* weights(int panel) const { return w_.data + panel * panel_bytes_; }

  private:
    bool fused() const { return tokens_ <= TILING.fused; }
    Cut tiles(int n) const { return Cut(n, fused() ? TILING.largest() : TILING.tokens); }

    void in_registers(int panel, int panels, int from, int n, float* acc, const uint8_t* next) const {
        const Cut cut = tiles(n);
        const Column& kernels = panels > 1 ? several<S> : single<S>;
        for (int tile = 0; tile < cut.count; tile++) {
            const int t = cut(tile), m = cut(tile + 1) - t;
            const float* x = x_ + (size_t)(from + t) * ldx_;
            const Ahead ahead = {next, tile ? 0 : panels * S::bytes};
            if (panels == 1 || TILING.panels[m] == panels)
                kernels[m](weights(panel), panel_bytes_, x, ldx_, inputs_, acc + t * panels * PANEL, ahead);
            else
                by_panel(weights(panel), panels, x, m, acc + t * panels * PANEL, ahead);
        }
    }

    // A number of panels that no tile has: the last ones of a matrix, or a tile with one token less than the others.
    void by_panel(const uint8_t* w, int panels, const float* x, int m, float* acc, Ahead ahead) const {
        float one[MOST * PANEL];
        for (int i = 0; i < panels; i++, ahead.step = 0) {
            std::fill_n(one, m * PANEL, 0.0f);
            single<S>[m](w + i * panel_bytes_, 0, x, ldx_, inputs_, one, ahead);
            for (int t = 0; t < m; t++) std::copy_n(one + t * PANEL, PANEL, acc + (t * panels + i) * PANEL);
        }
    }

    void by_pieces(int panel, int panels, int from, int n, float* acc, const uint8_t* next) const {
        constexpr bool plain = std::is_same_v<S, StoreF32>;
        alignas(64) float floats[plain ? 1 : TILING.together * TILING.piece * PANEL];
        const Cut cut = tiles(n), pieces(inputs_ / BLOCK, TILING.piece / BLOCK);
        const Column& kernels = panels > 1 ? on_floats<TILING.together> : on_floats<1>;
        for (int i = 0; i < pieces.count; i++) {
            const int k = pieces(i) * BLOCK, piece = pieces(i + 1) * BLOCK - k, bytes = piece / S::unit * S::bytes;
            const uint8_t* at = weights(panel) + (size_t)(k / S::unit) * S::bytes;
            for (int p = 0; p < panels && !plain; p++)
                expand<S>(at + p * panel_bytes_, piece, floats + p * TILING.piece * PANEL);
            const size_t apart = plain ? panel_bytes_ : TILING.piece * PANEL * sizeof(float);
            const int units = piece / StoreF32::unit, step = round_up(panels * bytes / (units * cut.count), 64);
            for (int tile = 0; tile < cut.count; tile++, next += step * units) {
                const int t = cut(tile), m = cut(tile + 1) - t;
                kernels[m](plain ? at : (const uint8_t*)floats, apart, x_ + (size_t)(from + t) * ldx_ + k, ldx_, piece,
                           acc + t * panels * PANEL, {next, step});
            }
        }
    }

    const Matrix& w_;
    const float* x_;
    const int ldx_, tokens_, inputs_ = round_up(w_.inputs, BLOCK);
    const size_t panel_bytes_ = (size_t)(inputs_ / S::unit) * S::bytes;
};

template <class S>
void run(Team& team, const Matrix& w, const float* x, int ldx, int tokens, float* y, int ldy, Epilogue epilogue) {
    const Product<S> product(w, x, ldx, tokens);
    const int panels = (w.outputs + PANEL - 1) / PANEL, together = product.together();
    const int groups = (panels + together - 1) / together;
    const Cut slabs(tokens, SLAB);
    team.each(groups * slabs.count, 1, [&](int job, int next) {
        const int from = slabs(job / groups), n = slabs(job / groups + 1) - from;
        const int panel = job % groups * together, count = std::min(together, panels - panel);
        alignas(64) float acc[std::max(SLAB * TILING.together, TILING.fused * TILING.panels[1]) * PANEL];
        product.compute(panel, count, from, n, acc, product.weights((next + groups) % groups * together));
        for (int t = 0; t < n; t++)
            for (int i = 0; i < count; i++)
                finish(w, panel + i, acc + (t * count + i) * PANEL, y + (size_t)(from + t) * ldy, epilogue);
    });
}

}  // namespace

void gemm(Team& team, const Matrix& w, const float* x, int ldx, int tokens, float* y, int ldy, Epilogue epilogue) {
    with_storage(w.kind, [&]<class S>() { run<S>(team, w, x, ldx, tokens, y, ldy, epilogue); });
}

size_t packed_bytes(const Matrix& w) {
    return with_storage(w.kind, [&]<class S>() {
        return (size_t)round_up(w.outputs, PANEL) / PANEL * (round_up(w.inputs, BLOCK) / S::unit) * S::bytes;
    });
}

void pack_row(const Matrix& w, int output, const uint8_t* row, uint8_t* packed) {
    with_storage(w.kind, [&]<class S>() {
        uint8_t* at = packed + (size_t)(output / PANEL) * (round_up(w.inputs, BLOCK) / S::unit) * S::bytes;
        for (int k = 0; k < w.inputs; k += S::unit, at += S::bytes)
            S::write(at, row, k, std::min(S::unit, w.inputs - k), output % PANEL);
    });
}

void unpack_row(const Matrix& w, int output, float* to) {
    with_storage(w.kind, [&]<class S>() {
        const uint8_t* at = w.data + (size_t)(output / PANEL) * (round_up(w.inputs, BLOCK) / S::unit) * S::bytes;
        const int lane = output % PANEL;
        float weights[S::unit * PANEL];
        for (int k = 0; k < w.inputs; k += S::unit, at += S::bytes) {
            expand<S>(at, S::unit, weights);
            for (int i = 0; i < S::unit && k + i < w.inputs; i++) to[k + i] = weights[i * PANEL + lane];
        }
    });
}

}  // namespace paceline::PACELINE_ISA
