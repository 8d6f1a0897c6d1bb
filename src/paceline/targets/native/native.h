// Shared by the native target pass: the model as plain structs (mirrored in model.py) and eight-lane vectors.
//
// Every floating-point result is one fixed sequence of operations, whatever the number of tokens and threads:
// that is what makes speculative decoding bit-for-bit plain decoding. Vectors are therefore always eight lanes wide
// (the compiler splits them where registers are narrower), contraction is off, and `fma` is the only fused operation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "team.h"

#if defined(__FMA__)
#include <immintrin.h>
#endif

namespace paceline {

constexpr int LANES = 8;
constexpr int PANEL = 2 * LANES;  // outputs of a matrix that are stored, and computed, side by side
constexpr int BLOCK = 32;         // inputs are padded to whole blocks; also the block of the GGUF formats

enum Kind : int32_t { F32, BF16, Q8_0, Q4_0, Q4_1 };

struct Matrix {  // y = W x + bias, packed by `pack_row`
    int32_t kind, outputs, inputs, reserved;
    const uint8_t* data;
    const float* bias;  // or null
};

struct Layer {
    Matrix qkv, out, gate_up, down;  // gate_up: panels of eight gate rows followed by their eight up rows
    const float *attention_norm, *mlp_norm, *query_norm, *key_norm;  // any may be null: no norm there
};

struct Model {
    int32_t hidden, heads, kv_heads, head_dim, inner, reserved;
    float epsilon, scale;
    const Layer* layers;
    const float* norm;  // null: none
    Matrix head;
};

struct Pass {  // `tokens` new tokens, flat over the rows of the batch
    int32_t tokens, threads;
    const float *cosine, *sine;  // tables [positions, head_dim / 2]
    float* cache;                // [layers, 2, rows, kv_heads, capacity, head_dim] with these strides, in floats:
    int64_t layer_stride, value_stride, row_stride, head_stride;
    const int32_t* position;     // of each token
    const int32_t *row, *slot;   // where its key and value go
    const int32_t* prefix;       // a token sees slots 0 .. prefix-1 of its row,
    const int32_t *extra_start, *extra;  // then extra[extra_start[t] .. extra_start[t+1]-1], its own slot last
    float* workspace;            // workspace_floats(...) floats, 64-byte aligned
};

enum Epilogue { STORE, ADD, SWIGLU };

inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// Row stride of a GEMM's input: whole blocks, and no multiple of 4 KiB, so that rows do not fight for one cache set.
inline int row_stride(int inputs) {
    int padded = round_up(inputs, BLOCK);
    return padded % 1024 ? padded : padded + LANES;
}

// Called by all threads of a team alike.
void gemm(Team& team, const Matrix& w, const float* x, int ldx, int tokens, float* y, int ldy, Epilogue epilogue);
void attention(Team& team, const Model& model, const Pass& pass, int layer, const float* q, int ldq, float* out,
               int ldo, float* parts);

size_t attention_floats(const Model& model, const Pass& pass);
size_t packed_bytes(const Matrix& w);
void pack_row(const Matrix& w, int output, const uint8_t* row, uint8_t* packed);  // floats, bfloat16 or GGUF blocks
void unpack_row(const Matrix& w, int output, float* to);

// -- eight-lane vectors --------------------------------------------------------------------------------------------
using vf = float __attribute__((vector_size(32)));
using vi = int32_t __attribute__((vector_size(32)));
using vu = uint32_t __attribute__((vector_size(32)));
using vh = uint16_t __attribute__((vector_size(16)));

template <class V>
inline V load(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
inline vf splat(float s) { return vf{s, s, s, s, s, s, s, s}; }

inline vf fma(vf a, vf b, vf c) {
#if defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// Holds a value in a register: left alone, gcc loads a weight again for each of its uses.
inline vf keep(vf v) {
#if defined(__AVX2__)
    asm("" : "+x"(v));
#endif
    return v;
}

inline float sum(vf v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

// e^x to 2 ulp (Cephes' expf): split off n*ln2, a polynomial for the rest, n into the exponent.
inline vf exp(vf x) {
    x = x < splat(-87.3f) ? splat(-87.3f) : x;
    x = x > splat(88.3f) ? splat(88.3f) : x;
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    vf shifted = fma(x, splat(1.44269504f), magic);
    vf n = shifted - magic;
    vf r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r + splat(1.0f));
    vu exponent = ((vu)shifted - (vu)magic + 127u) << 23;
    return p * (vf)exponent;
}

}  // namespace paceline
