// AMX's eight tiles as instructions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "native.h"

#if defined(PACELINE_TILES) && defined(__AVX512BF16__)
#define PACELINE_HAS_TILES

namespace paceline::PACELINE_ISA {
namespace {

constexpr int ROWS = 16, LINE = 64;  // of a tile: rows, and bytes of each
constexpr int LEFT = 4, RIGHT = 6;   // tiles 0 to 3 are sums, 4 and 5 tokens, 6 and 7 weights

// What a thread's tiles are like; released when the job is done, so that nobody has to keep them.
class Tiles {
  public:
    // The tokens of two tiles, of which the second may be unused.
    void shape(int upper, int lower) {
        if (upper == upper_ && lower == lower_) return;
        upper_ = upper, lower_ = lower;
        Shape shape{.palette = 1};
        for (int tile = 0; tile < 8; tile++) shape.bytes[tile] = LINE, shape.rows[tile] = ROWS;
        for (int tile : {0, 1, LEFT}) shape.rows[tile] = upper;
        for (int tile : {2, 3, LEFT + 1}) shape.rows[tile] = lower ? lower : upper;
        asm volatile("ldtilecfg %0" ::"m"(shape));
    }
    ~Tiles() { asm volatile("tilerelease"); }

  private:
    struct alignas(64) Shape {
        uint8_t palette, start = 0, unused[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    };
    int upper_ = 0, lower_ = 0;
};

template <int TILE>
inline void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}

template <int TILE>
inline void load_tile(const void* from, size_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(TILE), "r"(from), "r"(stride) : "memory");
}

template <int TILE>
inline void store_tile(void* to, size_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(TILE), "r"(to), "r"(stride) : "memory");
}

template <int SUM, int TOKENS, int WEIGHTS>
inline void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(TOKENS), "i"(WEIGHTS));
}

}  // namespace
}  // namespace paceline::PACELINE_ISA

#endif
