// Products whose inputs are rounded to bfloat16, as a model in bfloat16 asks for.
//
// A product of two bfloat16 is exact in float32, so the sums are gemm.cpp's chains of fused multiply-adds over rounded
// inputs: the same bits at any width. vdpbf16ps takes two links at a time: its lanes hold the bfloat16 of two inputs,
// and it adds first the upper, then the lower product, each rounded to nearest even. So the first input of a pair
// stands above the second, here and in StoreBF16, and the result has the bits of two multiply-adds, but for numbers
// below 2^-126, which vdpbf16ps takes for zero. Other instruction sets, and matrices stored otherwise, go through
// gemm.cpp; AMX has an order of its own (amx.cpp).
//
// Blocking. Tiles of tokens x panels as in gemm.cpp. Nothing is to be unpacked, so a tile goes over all inputs at once:
// a panel's weights and a tile's inputs stay in the L2 cache, which keeps up with the products.
#include "bfloat16.h"

#include <array>
#include <utility>

#include "amx.h"
#include "int8.h"
#include "kernels.h"
#include "tiles.h"
#include "vectors.h"

namespace paceline::PACELINE_ISA {
namespace {

constexpr int PAIR_PANELS[] = {0, 4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1};  // of a tile, by its tokens
constexpr int PAIR_TOKENS = sizeof(PAIR_PANELS) / sizeof(int) - 1;

constexpr int pair_panels(int tokens) { return PAIR_PANELS[Cut(tokens, PAIR_TOKENS).largest()]; }

constexpr bool pairs_fit_into_a_job() {  // gemm.cpp has room for as many panels as a slab has tokens
    for (int tokens = 1; tokens <= SLAB; tokens++)
        if (tokens * pair_panels(tokens) > SLAB * TILING.together) return false;
    return true;
}
static_assert(pairs_fit_into_a_job());

// To nearest even, as floats.
void round_row(float* x, int count) {
    for (int i = 0; i < count; i += WIDE) {
        const wu bits = (wu)load<wf>(x + i);
        store(x + i, (wf)((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u));
    }
}

#if defined(__AVX512BF16__)

// To pairs of bfloat16, which fill the first half of the row.
void pair_row(float* x, int count) {
    for (int i = 0; i < count; i += 2 * WIDE) {
        const __m512bh halves = _mm512_cvtne2ps_pbh((__m512)load<wf>(x + i + WIDE), (__m512)load<wf>(x + i));
        store(x + i / 2, (wf)_mm512_rol_epi32((__m512i)halves, 16));
    }
}

// sum += upper * upper + lower * lower, the pair broadcast as part of the instruction (see add_products).
inline void add_pair(wf& sum, const float* pair, wf weights) {
    asm("vdpbf16ps %1%{1to16%}, %2, %0" : "+v"(sum) : "m"(*pair), "v"(weights));
}

constexpr int TURN = 4;  // pairs that the compiler unrolls

// acc[token] (`stride` apart) = sums of M tokens, P panels; prefetches `lines` cache lines a pair.
template <int M, int P>
void kernel(const uint8_t* w, size_t panel_bytes, const float* x, int ldx, int pairs, float* acc, int stride,
            const uint8_t* next, int lines) {
    wf a[M * P] = {};
    for (int k = 0; k < pairs; k += TURN, w += TURN * PANEL * 4) {
        for (int line = 0; line < TURN * lines; line++, next += 64) __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 4
        for (int i = 0; i < TURN; i++) {
#pragma GCC unroll 4
            for (int panel = 0; panel < P; panel++) {
                const wf weights = keep(load<wf>(w + panel * panel_bytes + i * PANEL * 4));
#pragma GCC unroll 16
                for (int m = 0; m < M; m++) add_pair(a[m * P + panel], x + (size_t)m * ldx + k + i, weights);
            }
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int panel = 0; panel < P; panel++) store(acc + (size_t)m * stride + panel * PANEL, a[m * P + panel]);
}

using Kernel = void (*)(const uint8_t*, size_t, const float*, int, int, float*, int, const uint8_t*, int);
using Column = std::array<Kernel, PAIR_TOKENS + 1>;  // by tokens

constexpr Column single = []<size_t... I>(std::index_sequence<I...>) {
    return Column{nullptr, kernel<I + 1, 1>...};
}(std::make_index_sequence<PAIR_TOKENS>());
constexpr Column several = []<size_t... I>(std::index_sequence<I...>) {
    return Column{nullptr, kernel<I + 1, PAIR_PANELS[I + 1]>...};
}(std::make_index_sequence<PAIR_TOKENS>());

#endif

}  // namespace

void round_row(const Matrix& w, float* x) {
    const int count = round_up(w.inputs, BLOCK);
    if (w.input_kind == F32) return;
    if (in_bytes(w)) return round_row_to_bytes(x, count);
    if (in_tiles(w)) return pair_row_for_blocks(x, count);
#if defined(__AVX512BF16__)
    if (in_pairs(w)) return pair_row(x, count);
#endif
    round_row(x, count);
}

void round_inputs(Team& team, const Matrix& w, float* x, int ldx, int tokens) {
    if (w.input_kind != F32) team.each(tokens, 1, [&](int t, int) { round_row(w, x + (size_t)t * ldx); });
}

int dot_panels(int tokens) { return use_tiles.load(std::memory_order_relaxed) ? tile_panels(tokens) : pair_panels(tokens); }

void dot_products(const uint8_t* weights, int panels, const float* x, int ldx, int tokens, int pairs, float* acc,
                  const uint8_t* next) {
#if defined(__AVX512BF16__)
    if (use_tiles.load(std::memory_order_relaxed))
        return tile_products(weights, panels, x, ldx, tokens, pairs, acc, next);
    const size_t panel_bytes = (size_t)pairs * PANEL * 4;
    const Cut cut(tokens, PAIR_TOKENS);
    for (int tile = 0; tile < cut.count; tile++) {
        const int t = cut(tile), m = cut(tile + 1) - t, stride = panels * PANEL;
        const float* from = x + (size_t)t * ldx;
        float* to = acc + t * stride;
        if (PAIR_PANELS[m] == panels) {
            several[m](weights, panel_bytes, from, ldx, pairs, to, stride, next, tile ? 0 : panels);
            continue;
        }
        for (int i = 0; i < panels; i++)  // the last of a matrix, or a tile with one token less than the others
            single[m](weights + i * panel_bytes, panel_bytes, from, ldx, pairs, to + i * PANEL, stride,
                      next + i * panel_bytes, tile ? 0 : 1);
    }
#endif
}

}  // namespace paceline::PACELINE_ISA
