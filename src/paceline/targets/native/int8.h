// Matrix products of inputs that are rounded to 8 bits: the part of a product that gemm.cpp gives a job.
#pragma once

#include "formats.h"

namespace paceline::PACELINE_ISA {

// A block of inputs, in place of its floats: input = scale * number.
struct Rounded {
    int8_t by[3][BLOCK];  // the numbers in the orders that digits of 8, 5 and 6, of 4, and of 2 bits come in (`Digits`)
    float scale;
    float sums[3];        // of the numbers: the first half's, the second's, all
    int32_t unused[4];
};
static_assert(sizeof(Rounded) == BLOCK * sizeof(float));

inline bool in_bytes(const Matrix& w) { return w.input_kind == Q8_0; }

void round_row_to_bytes(float* x, int count);

int byte_panels(int tokens);  // of a job

// acc[token][panels * 16] = sums over `inputs` inputs that are `Rounded`, `panels` panels from `weights` on, which lie
// one after the other, at most 96 tokens; `next` are the weights to prefetch.
void byte_products(int32_t kind, const uint8_t* weights, int panels, const float* x, int ldx, int tokens, int inputs,
                   float* acc, const uint8_t* next);

// Of M tokens x P panels; acc[token] lies `stride` floats apart.
using ByteKernel = void (*)(const uint8_t* w, size_t panel_bytes, const float* x, int ldx, int inputs, float* acc,
                            int stride, Ahead ahead);

// Tokens x panels of a tile: sums as floats and as whole numbers stay in registers.
#if defined(__AVX512F__)
constexpr int BYTE_PANELS[] = {0, 2, 2, 2, 2, 2, 2, 1, 1};
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int BYTE_PANELS[] = {0, 2, 1, 1, 1};
#else
constexpr int BYTE_PANELS[] = {0, 1};
#endif
constexpr int BYTE_TOKENS = sizeof(BYTE_PANELS) / sizeof(int) - 1;

struct ByteKernels {  // by tokens: for one panel, and for as many as BYTE_PANELS has
    ByteKernel single[BYTE_TOKENS + 1], several[BYTE_TOKENS + 1];
};

// Null for a kind that is not stored as digits.
const ByteKernels* byte_kernels(int32_t kind);    // int8.cpp
const ByteKernels* byte_kernels_k(int32_t kind);  // int8_k.cpp

}  // namespace paceline::PACELINE_ISA
