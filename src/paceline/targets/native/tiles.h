// Which tile of a matrix product serves which number of tokens, on each instruction set.
//
// A tile is tokens x panels in one micro-kernel: tokens * panels * VECTORS accumulators in registers, each a chain of
// its own. Chains in flight must hide the latency of a multiply-add (four cycles: at two a cycle eight chains, four
// where 512 bits take both pipes) and leave registers for weights, scales and one input. Fewer panels load inputs more
// often, fewer tokens unpack weights more often; many panels leave fewer jobs, which divide less evenly among threads.
// The table for AVX-512 was measured on Sapphire Rapids and Zen 5, those for AVX2 and Zen on Zen 4, with gcc 12: the next
// larger tile of the narrow ones spills. Eight tokens by three panels of floats reach nine tenths of the multiply-adds
// on Sapphire Rapids; by two panels all of them on Zen 4.
#pragma once

#include "vectors.h"

namespace paceline::PACELINE_ISA {

constexpr int MOST = 16;  // tokens of any tile
constexpr int SLAB = 96;  // tokens of a job

struct Tiling {
    int panels[MOST + 1];  // of a tile that unpacks weights in registers, by its tokens; 0: there is none
    int fused;             // up to so many tokens go through in such tiles; above, weights are unpacked to floats once
    int tokens, together;  // the largest tile on floats: so many tokens, so many panels
    int piece;             // inputs unpacked at a time: piece * together * 64 bytes stay in the L1 cache

    constexpr int largest() const {
        int most = 0;
        for (int i = 1; i <= MOST; i++)
            if (panels[i]) most = i;
        return most;
    }
};

#if defined(PACELINE_ZEN)  // 32 registers of 16 lanes
constexpr Tiling TILING = {{0, 3, 3, 3, 3, 3, 3, 3, 2, 2, 2, 2, 2}, 12, 8, 2, 96};
#elif defined(__AVX512F__)  // the same
constexpr Tiling TILING = {{0, 3, 3, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2}, 12, 8, 3, 96};
#elif defined(__AVX2__)  // 16 registers of 8 lanes
constexpr Tiling TILING = {{0, 2, 1, 1, 1, 1}, 8, 6, 1, 256};
#elif defined(__aarch64__)  // 32 registers of 4 lanes, two to a vector
constexpr Tiling TILING = {{0, 2, 2, 1, 1, 1, 1}, 12, 6, 1, 256};
#else  // multiply-adds are calls
constexpr Tiling TILING = {{0, 1, 1}, 2, 2, 1, 256};
#endif

// `tokens` are cut into `count` tiles, as even as can be; tile i has those from cut(i) on.
struct Cut {
    int tokens, count;
    constexpr Cut(int tokens, int most) : tokens(tokens), count((tokens + most - 1) / most) {}
    constexpr int operator()(int i) const { return (int64_t)tokens * i / count; }
    constexpr int largest() const { return (tokens + count - 1) / count; }
};

// Every number of tokens up to a slab has its tiles, none is larger than there are kernels for, and more tokens never
// take more panels.
constexpr bool covers_all(const Tiling& tiling) {
    for (int i = 1; i <= tiling.largest(); i++)
        if (tiling.panels[i] < 1 || tiling.panels[i] > (i > 1 ? tiling.panels[i - 1] : PANEL)) return false;
    for (int tokens = 1; tokens <= SLAB; tokens++) {
        const bool fused = tokens <= tiling.fused;
        const Cut cut(tokens, fused ? tiling.largest() : tiling.tokens);
        int covered = 0;
        for (int i = 0; i < cut.count; i++) {
            const int tile = cut(i + 1) - cut(i);
            if (tile < 1 || tile > cut.largest()) return false;
            covered += tile;
        }
        if (covered != tokens || cut.largest() > (fused ? tiling.largest() : tiling.tokens)) return false;
    }
    return tiling.fused <= SLAB && tiling.tokens <= MOST && tiling.piece % BLOCK == 0;
}
static_assert(covers_all(TILING));

}  // namespace paceline::PACELINE_ISA
