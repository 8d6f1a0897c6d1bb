// Activations, and what they are made of, a vector of floats at a time: every lane by the same operations.
#pragma once

#include "native.h"
#include "vectors.h"

namespace paceline::PACELINE_ISA {

// To 2 ulp (Cephes' tanhf): a polynomial near 0, else by e^2x.
template <class V>
inline V tanh(V x) {
    const V size = x < splat<V>(0.0f) ? -x : x, z = x * x;
    V p = splat<V>(-5.70498872745e-3f);
    p = fma(p, z, splat<V>(2.06390887954e-2f));
    p = fma(p, z, splat<V>(-5.37397155531e-2f));
    p = fma(p, z, splat<V>(1.33314422036e-1f));
    p = fma(p, z, splat<V>(-3.33332819422e-1f));
    const V far = splat<V>(1.0f) - splat<V>(2.0f) / (exp(size + size) + splat<V>(1.0f));
    return size < splat<V>(0.625f) ? fma(p * z, x, x) : x < splat<V>(0.0f) ? -far : far;
}

template <class V>
inline V silu(V x) {
    return x / (splat<V>(1.0f) + exp(-x));
}

// x/2 (1 + erf(x / sqrt 2)), within 2e-7 of it or of its size (Numerical Recipes' erfc).
template <class V>
inline V gelu(V x) {
    const V a = (x < splat<V>(0.0f) ? -x : x) * splat<V>(0.70710678f);
    const V t = splat<V>(1.0f) / fma(a, splat<V>(0.5f), splat<V>(1.0f));
    V p = splat<V>(0.17087277f);
    for (float c : {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f, 0.09678418f, 0.37409196f,
                    1.00002368f, -1.26551223f})
        p = fma(p, t, splat<V>(c));
    const V tail = t * exp(fma(-a, a, p));
    return x * splat<V>(0.5f) * (x < splat<V>(0.0f) ? tail : splat<V>(2.0f) - tail);
}

template <class V>
inline V gelu_tanh(V x) {
    const V inside = splat<V>(0.79788456f) * fma(x * x * x, splat<V>(0.044715f), x);
    return x * splat<V>(0.5f) * (splat<V>(1.0f) + tanh(inside));
}

template <class V>
inline V relu_squared(V x) {
    const V positive = x > splat<V>(0.0f) ? x : splat<V>(0.0f);
    return positive * positive;
}

// gpt-oss's: (up + 1) gate / (1 + e^(-alpha gate)), of clamped values.
template <class V>
inline V clamped_swiglu(V gate, V up, float alpha, float limit) {
    const V most = splat<V>(limit), least = splat<V>(-limit);
    gate = gate > most ? most : gate;
    up = up > most ? most : up < least ? least : up;
    return (up + splat<V>(1.0f)) * (gate / (splat<V>(1.0f) + exp(splat<V>(-alpha) * gate)));
}

// silu(gate) * up of rows that are eight gates followed by their eight ups. Registers of sixteen take two rows at once.
inline void gate_rows(const float* from, int stride, int rows, float* to, int ldt) {
    int t = 0;
#if defined(__AVX512F__)
    constexpr int firsts = 0x44, seconds = 0xee;  // halves of both
    for (; t + 1 < rows; t += 2) {
        const float* row = from + (size_t)t * stride;
        float* result = to + (size_t)t * ldt;
        const __m512 a = (__m512)load<wf>(row), b = (__m512)load<wf>(row + stride);
        const wf gates = (wf)_mm512_shuffle_f32x4(a, b, firsts), ups = (wf)_mm512_shuffle_f32x4(a, b, seconds);
        const __m512 both = (__m512)(silu(gates) * ups);
        store(result, (vf)_mm512_castps512_ps256(both));
        store(result + ldt, (vf)_mm512_extractf32x8_ps(both, 1));
    }
#endif
    for (; t < rows; t++) {
        const float* row = from + (size_t)t * stride;
        store(to + (size_t)t * ldt, silu(load<vf>(row)) * load<vf>(row + LANES));
    }
}

// act(function of this kind), once outside of the loops it stands in.
template <class Act>
void with_activation(int kind, Act act) {
    switch (kind) {
        case GELU: return act([](auto x) { return gelu(x); });
        case GELU_TANH: return act([](auto x) { return gelu_tanh(x); });
        case RELU_SQUARED: return act([](auto x) { return relu_squared(x); });
        default: return act([](auto x) { return silu(x); });
    }
}

}  // namespace paceline::PACELINE_ISA
