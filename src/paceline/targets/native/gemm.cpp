// Matrix products y[token][output] = sum_k x[token][k] * w[output][k], for 1 to a few hundred tokens.
//
// Blocking. A matrix is packed into panels of 16 outputs: for each k the 16 weights lie side by side, so that lanes are
// outputs and every output is ONE chain of fused multiply-adds over k = 0, 1, 2, ...: the same bits at any width, in
// any storage that represents the same weights. The micro-kernel keeps up to 6 tokens x 16 outputs (12 accumulators)
// in registers. A job is one panel for up to 96 tokens, so that weights stream from memory once:
//   narrow: dequantise in registers, each weight used for all tokens (one token alone takes two panels at a time, as
//           one panel's two chains of additions would wait for themselves);
//   wide:   256 k at a time (16 KiB of weights, in L1), dequantised to floats first, over all tiles of 6 tokens;
//           accumulators are carried from one such piece to the next, which leaves the chain as it is.
#include <algorithm>
#include <type_traits>

#include "native.h"

namespace paceline {
namespace {

constexpr int TILE = 6, SLAB = 96, PIECE = 256, AHEAD = 2048;

// Eight fp16 numbers; exact for all finite values.
inline vf half(const uint8_t* eight) {
#if defined(__F16C__)
    return (vf)_mm256_cvtph_ps(load<__m128i>(eight));
#endif
    vh h = load<vh>(eight);
    vu wide = __builtin_convertvector(h, vu);
    vf magnitude = (vf)((wide & 0x7fffu) << 13) * splat(0x1p112f);
    return (vf)((vu)magnitude | ((wide & 0x8000u) << 16));
}

// -- storages: how `unit` inputs of a panel lie in `bytes` bytes, and how to get the weights of input i, vector v -----
struct StoreF32 {
    static constexpr int unit = 8, bytes = unit * PANEL * 4, fused = TILE;
    const uint8_t* p;
    explicit StoreF32(const uint8_t* at) : p(at) {}
    vf get(int i, int v) const { return load<vf>(p + (i * PANEL + v * LANES) * 4); }

    static void write(uint8_t* to, const uint8_t* row, int k, int count, int lane) {
        for (int i = 0; i < count; i++) std::memcpy(to + (i * PANEL + lane) * 4, row + (k + i) * 4, 4);
    }
};

struct StoreBF16 {  // a 32-bit lane holds the weights of two inputs
    static constexpr int unit = 8, bytes = unit * PANEL * 2, fused = TILE;
    const uint8_t* p;
    explicit StoreBF16(const uint8_t* at) : p(at) {}
    vf get(int i, int v) const {
        vu pair = load<vu>(p + (i / 2 * PANEL + v * LANES) * 4);
        return (vf)(i % 2 ? pair & 0xffff0000u : pair << 16);
    }
    static void write(uint8_t* to, const uint8_t* row, int k, int count, int lane) {
        for (int i = 0; i < count; i++)
            std::memcpy(to + (i / 2 * PANEL + lane) * 4 + i % 2 * 2, row + (k + i) * 2, 2);
    }
};

// GGUF's blocks of 32 inputs are all w = d * u + m with unsigned u of 4 or 8 bits (Q8_0: u = q + 128, m = -128 d; Q4_0:
// m = -8 d). d * u has at most 19 significant bits, so the fused multiply-add rounds as gguf's d * q + m does.
// A 32-bit lane holds 8 or 4 successive u of one output; the odd ones of a byte pair stay where they are, times 2^-BITS.
template <int BITS, int OFFSET, bool MINIMUM>
struct StoreBlocks {
    static constexpr int scales = PANEL * 2 * (1 + MINIMUM), words = 32 / BITS;  // inputs in a word
    static constexpr int unit = BLOCK, bytes = scales + BLOCK * PANEL * BITS / 8, fused = TILE - 1;
    static constexpr int source = 2 + 2 * MINIMUM + BLOCK * BITS / 8;
    const uint8_t* p;
    vf d[2], shifted_d[2], m[2];
    explicit StoreBlocks(const uint8_t* at) : p(at + scales) {
        for (int v = 0; v < 2; v++) {
            d[v] = half(at + v * LANES * 2);
            shifted_d[v] = d[v] * splat(1.0f / (1 << BITS));
            m[v] = MINIMUM ? half(at + PANEL * 2 + v * LANES * 2) : d[v] * splat(-OFFSET);
        }
    }
    vf get(int i, int v) const {
        vu word = load<vu>(p + (i / words * PANEL + v * LANES) * 4);
        constexpr uint32_t mask = (1u << BITS) - 1;
        int part = i % words;
        bool odd = part % 2 && part != words - 1;
        vu u = part == words - 1 ? word >> (32 - BITS)
               : odd             ? word >> ((part - 1) * BITS) & (mask << BITS)
                                 : word >> (part * BITS) & mask;
        return fma(__builtin_convertvector((vi)u, vf), odd ? shifted_d[v] : d[v], m[v]);
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

// -- micro-kernel: acc[token][16 P outputs] += x * w over `count` inputs, M tokens x P panels ---------------------
template <class S, int M, int P, int HINT = 3>
void kernel(const uint8_t* w, size_t panel_bytes, const float* x, int ldx, int count, float* acc, const uint8_t* ahead,
            int step) {
    vf a[M * P * 2];
#pragma GCC unroll 16
    for (int i = 0; i < M * P * 2; i++) a[i] = load<vf>(acc + i * LANES);
    for (int k = 0; k < count; k += S::unit, w += S::bytes, ahead += step) {
        for (int line = 0; line < step; line += 64)
            for (int panel = 0; panel < P; panel++) __builtin_prefetch(ahead + panel * panel_bytes + line, 0, HINT);
        const S units[] = {S(w), S(w + (P - 1) * panel_bytes)};
#pragma GCC unroll 32
        for (int i = 0; i < S::unit; i++) {
#pragma GCC unroll 2
            for (int panel = 0; panel < P; panel++) {
                vf low = keep(units[panel].get(i, 0)), high = keep(units[panel].get(i, 1));
#pragma GCC unroll 6
                for (int m = 0; m < M; m++) {
                    vf value = splat(x[(size_t)m * ldx + k + i]), *sums = a + (m * P + panel) * 2;
                    sums[0] = fma(value, low, sums[0]);
                    sums[1] = fma(value, high, sums[1]);
                }
            }
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < M * P * 2; i++) store(acc + i * LANES, a[i]);
}

using Kernel = void (*)(const uint8_t*, size_t, const float*, int, int, float*, const uint8_t*, int);

template <class S>
constexpr Kernel kernels[TILE + 1] = {nullptr,         kernel<S, 1, 1>, kernel<S, 2, 1>, kernel<S, 3, 1>,
                                      kernel<S, 4, 1>, kernel<S, 5, 1>, kernel<S, 6, 1>};
constexpr Kernel wide[TILE + 1] = {nullptr,
                                   kernel<StoreF32, 1, 1, 2>,
                                   kernel<StoreF32, 2, 1, 2>,
                                   kernel<StoreF32, 3, 1, 2>,
                                   kernel<StoreF32, 4, 1, 2>,
                                   kernel<StoreF32, 5, 1, 2>,
                                   kernel<StoreF32, 6, 1, 2>};
template <class S>
void expand(const uint8_t* w, int count, float* to) {
    for (int k = 0; k < count; k += S::unit, w += S::bytes) {
        S unit(w);
#pragma GCC unroll 32
        for (int i = 0; i < S::unit; i++)
            for (int v = 0; v < 2; v++) store(to + (size_t)(k + i) * PANEL + v * LANES, unit.get(i, v));
    }
}

inline vf silu(vf x) { return x / (splat(1.0f) + exp(-x)); }

// One token's 16 sums of panel `panel` to where they belong.
void finish(const Matrix& w, int panel, const float* acc, float* y, Epilogue epilogue) {
    const int first = panel * PANEL, count = std::min(PANEL, w.outputs - first);
    float sums[PANEL];
    for (int i = 0; i < PANEL; i++) sums[i] = acc[i];
    if (w.bias)
        for (int i = 0; i < count; i++) sums[i] += w.bias[first + i];
    if (epilogue == SWIGLU) return store(y + first / 2, silu(load<vf>(sums)) * load<vf>(sums + LANES));
    y += first;
    if (epilogue == STORE)
        std::memcpy(y, sums, count * sizeof(float));
    else if (count == PANEL)  // a constant count, for the compiler
        for (int i = 0; i < PANEL; i++) y[i] += sums[i];
    else
        for (int i = 0; i < count; i++) y[i] += sums[i];
}

template <class S>
void run(Team& team, const Matrix& w, const float* x, int ldx, int tokens, float* y, int ldy, Epilogue epilogue) {
    constexpr bool plain = std::is_same_v<S, StoreF32>;
    const int inputs = round_up(w.inputs, BLOCK), panels = (w.outputs + PANEL - 1) / PANEL;
    const size_t panel_bytes = (size_t)(inputs / S::unit) * S::bytes;
    const bool fused = tokens <= S::fused;
    const int together = tokens == 1 ? 2 : 1, groups = (panels + together - 1) / together;
    const int slabs = (tokens + SLAB - 1) / SLAB;
    const int grain = std::max(1, groups * slabs / (team.threads * 8));
    team.each(groups * slabs, grain, [&](int job) {
        const int slab = job / groups, panel = job % groups * together, pair = std::min(together, panels - panel);
        const int from = (int64_t)tokens * slab / slabs, n = (int64_t)tokens * (slab + 1) / slabs - from;
        const uint8_t* weights = w.data + panel * panel_bytes;
        alignas(64) float acc[SLAB * PANEL], floats[PIECE * PANEL];
        std::memset(acc, 0, sizeof(float) * PANEL * n * pair);
        if (fused) {
            const Kernel compute = pair == 2 ? kernel<S, 1, 2> : kernels<S>[n];
            compute(weights, panel_bytes, x, ldx, inputs, acc, weights + AHEAD, S::bytes);
        } else {
            const int tiles = (n + TILE - 1) / TILE, pieces = (inputs + PIECE - 1) / PIECE;
            for (int i = 0; i < pieces; i++) {
                const int k = inputs / BLOCK * i / pieces * BLOCK, piece = inputs / BLOCK * (i + 1) / pieces * BLOCK - k;
                const int bytes = piece / S::unit * S::bytes, units = piece / StoreF32::unit;
                const int step = round_up(bytes / (units * tiles), 64);
                const uint8_t *at = weights + (size_t)(k / S::unit) * S::bytes, *next = at + bytes;
                if (!plain) expand<S>(at, piece, floats), at = (const uint8_t*)floats;
                for (int tile = 0; tile < tiles; tile++, next += step * units) {
                    const int t = n * tile / tiles, m = n * (tile + 1) / tiles - t;
                    wide[m](at, 0, x + (size_t)(from + t) * ldx + k, ldx, piece, acc + t * PANEL, next, step);
                }
            }
        }
        for (int t = 0; t < n; t++)
            for (int i = 0; i < pair; i++)
                finish(w, panel + i, acc + (t * pair + i) * PANEL, y + (size_t)(from + t) * ldy, epilogue);
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

}  // namespace paceline
