// Matrix products of bfloat16 in AMX's tiles, which some of Intel's server processors have: up to sixteen tokens by
// sixteen outputs by 32 inputs in one instruction.
#pragma once

#include "formats.h"

namespace paceline::PACELINE_ISA {

int tile_panels(int tokens);  // of a job

// As dot_products (bfloat16.h), from inputs in pairs.
void tile_products(const uint8_t* weights, int panels, const float* x, int ldx, int tokens, int pairs, float* acc,
                   const uint8_t* next);

// Of weights in blocks (amx_blocks.cpp). Inputs, in place of a block's floats: of input 8v + i and 8v + 4 + i, i < 4,
// the bfloat16 are pair 4v + i.
struct PairedBlock {
    uint16_t pairs[BLOCK];
    float sums[3];  // of the rounded inputs: the first half's, the second's, all
    float unused[13];
};
static_assert(sizeof(PairedBlock) == BLOCK * sizeof(float));

// Whether inputs become such blocks.
inline bool in_tiles(const Matrix& w) {
    return w.input_kind == BF16 && w.kind != BF16 && w.kind != F32 && w.kind != F16 &&
           use_tiles.load(std::memory_order_relaxed);
}

void pair_row_for_blocks(float* x, int count);
#if defined(__AVX512BF16__)
constexpr int TILE_BLOCK_PANELS = 4;  // of a job
#else
constexpr int TILE_BLOCK_PANELS = 1;
#endif
// As byte_products (int8.h).
void tile_block_products(int32_t kind, const uint8_t* weights, int panels, const float* x, int ldx, int tokens,
                         int inputs, float* acc, const uint8_t* next);

double tile_multiply_add(int64_t turns);  // independent products and sums; how many operations

}  // namespace paceline::PACELINE_ISA
