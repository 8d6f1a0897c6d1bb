// Matrix products of bfloat16 by AVX-512's dot products, or in AMX's tiles: what gemm.cpp gives a job.
#pragma once

#include "native.h"

namespace paceline::PACELINE_ISA {

// Whether inputs become pairs of bfloat16 (see bfloat16.cpp) instead of rounded floats.
inline bool in_pairs([[maybe_unused]] const Matrix& w) {
#if defined(__AVX512BF16__)
    return w.input_kind == BF16 && w.kind == BF16 && (has_bfloat16_dots || use_tiles.load(std::memory_order_relaxed));
#else
    return false;
#endif
}

int dot_panels(int tokens);  // of a job

// acc[token][panels * 16] = sums over `pairs` pairs of inputs, `panels` panels from `weights` on, which lie one after
// the other, at most 96 tokens; `next` are the weights to prefetch.
void dot_products(const uint8_t* weights, int panels, const float* x, int ldx, int tokens, int pairs, float* acc,
                  const uint8_t* next);

}  // namespace paceline::PACELINE_ISA
