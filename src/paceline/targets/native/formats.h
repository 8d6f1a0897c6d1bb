// The kinds of storage as functions, which kernel.h makes and gemm.cpp calls.
#pragma once

#include <array>

#include "tiles.h"

namespace paceline::PACELINE_ISA {

struct Ahead {  // what a kernel prefetches, from `at` on: `step` bytes a turn, of inputs in bytes a unit
    const uint8_t* at;
    int step;

    // gcc 12 leaves a function out that does nothing but prefetch, unless it is part of its caller from the first.
    [[gnu::always_inline]] void turn() {
        for (int line = 0; line < step; line += 64)
            if (has_large_l1) __builtin_prefetch(at + line, 0, 3);
            else __builtin_prefetch(at + line, 0, 2);
        at += step;
    }
};

using Kernel = void (*)(const uint8_t* w, size_t panel_bytes, const float* x, int ldx, int count, float* acc,
                        Ahead ahead);
using Column = std::array<Kernel, MOST + 1>;  // by tokens

struct Format {
    int block, bytes, unit;  // inputs stored together, the bytes they take in a panel; inputs that share scales
    void (*write)(uint8_t* to, const uint8_t* row, int k, int count, int lane);  // see storage.h
    void (*expand)(const uint8_t* panel, int k, int count, float* to);
    Column kernels;  // that unpack in registers, for as many panels as TILING says

    int bytes_of(int inputs) const { return (int64_t)inputs * bytes / block; }  // in a panel
};

namespace formats {
extern const Format f32, bf16, f16, q8_0, q4_0, q4_1, q4_1_near, q5_0, q5_1, q2_k, q3_k, q4_k, q5_k, q6_k;
}

// `near`, of Q4_1 alone: see storage.h.
inline const Format& format(int32_t kind, bool near = false) {
    using namespace formats;
    static constexpr const Format* all[KINDS] = {&f32,  &bf16, &q8_0, &q4_0, &q4_1, &f16, &q5_0,
                                                 &q5_1, &q2_k, &q3_k, &q4_k, &q5_k, &q6_k};
    return near ? q4_1_near : *all[kind];
}

}  // namespace paceline::PACELINE_ISA
