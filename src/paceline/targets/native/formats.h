// The kinds of storage, each as functions: product.h makes them of a storage, gemm.cpp calls them.
#pragma once

#include "native.h"

namespace paceline::PACELINE_ISA {

struct Input {  // of a matrix product: x[tokens][inputs], rows `ldx` apart, inputs padded to whole blocks
    const float* x;
    int ldx, tokens, inputs;
};

struct Job {  // `panels` panels from `weights` on, for tokens first .. first + tokens - 1
    const uint8_t *weights, *next;  // next: what to prefetch
    int panels, first, tokens;
};

struct Format {
    int block, bytes;  // inputs stored together, and the bytes they take in a panel
    void (*write)(uint8_t* to, const uint8_t* row, int k, int count, int lane);  // see storage.h
    void (*expand)(const uint8_t* panel, int k, int count, float* to);
    int (*together)(int tokens);                                       // panels of a job
    void (*product)(const Input& in, const Job& job, float* acc);      // acc[token][panels * 16] = sums
};

namespace formats {
extern const Format f32, bf16, f16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k;
}

inline const Format& format(int32_t kind) {
    using namespace formats;
    static constexpr const Format* all[KINDS] = {&f32,  &bf16, &q8_0, &q4_0, &q4_1, &f16,
                                                 &q5_0, &q5_1, &q4_k, &q5_k, &q6_k};
    return *all[kind];
}

}  // namespace paceline::PACELINE_ISA
