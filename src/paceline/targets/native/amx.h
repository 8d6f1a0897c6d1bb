// Matrix products of bfloat16 in AMX's tiles, which some of Intel's server processors have: up to sixteen tokens by
// sixteen outputs by 32 inputs in one instruction.
#pragma once

#include "native.h"

namespace paceline::PACELINE_ISA {

int tile_panels(int tokens);  // of a job

// As dot_products (bfloat16.h), from inputs in pairs.
void tile_products(const uint8_t* weights, int panels, const float* x, int ldx, int tokens, int pairs, float* acc,
                   const uint8_t* next);

double tile_multiply_add(int64_t turns);  // independent products and sums; how many operations

}  // namespace paceline::PACELINE_ISA
