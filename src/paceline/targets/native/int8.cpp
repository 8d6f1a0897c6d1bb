// Products whose inputs are rounded to blocks of 8 bits, as llama.cpp does: four times as many at a time as in float32.
//
// Blocking. Tiles of tokens x panels over all inputs, as in bfloat16.cpp: digits take two or three operations for four
// inputs, so that each tile unpacks its own.
#include "int8.h"

#include "int8_kernel.h"
#include "kernels.h"

#if defined(__AVX512F__)
namespace paceline::avx2 {  // for processors whose AVX-512 has no products of bytes; a library for others may be without
__attribute__((weak)) void byte_products(int32_t kind, const uint8_t* weights, int panels, const float* x, int ldx, int tokens, int inputs,
                   float* acc, const uint8_t* next);
}
#endif

namespace paceline::PACELINE_ISA {
namespace {

constexpr int panels_for(int tokens) { return BYTE_PANELS[Cut(tokens, BYTE_TOKENS).largest()]; }

constexpr bool bytes_fit_into_a_job() {  // gemm.cpp has room for as many panels as a slab has tokens
    for (int tokens = 1; tokens <= SLAB; tokens++)
        if (tokens * panels_for(tokens) > SLAB * TILING.together) return false;
    return true;
}
static_assert(bytes_fit_into_a_job());

using Floats = Lanes<BLOCK / 2>::f;
using Bytes = Lanes<BLOCK / 2>::b;

// Half a block, in the three orders.
void place(Rounded& to, int half, Bytes numbers) {
    const int at = half * sizeof numbers;
    const Bytes by_two = __builtin_shufflevector(numbers, numbers, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    const Bytes by_four = __builtin_shufflevector(numbers, numbers, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    std::memcpy(to.by[0] + at, &numbers, sizeof numbers);
    std::memcpy(to.by[1] + at, &by_two, sizeof numbers);
    std::memcpy(to.by[2] + at, &by_four, sizeof numbers);
}

// To nearest even: what is added to a float moves its whole part to the lowest bits.
void round_block(float* x) {
    constexpr float to_whole = 12582912.0f;  // 1.5 * 2^23
    const auto larger = [](Floats a, Floats b) { return a > b ? a : b; };
    const auto size = [](Floats v) { return (Floats)((Lanes<BLOCK / 2>::u)v & 0x7fffffffu); };
    const Floats parts[] = {load<Floats>(x), load<Floats>(x + BLOCK / 2)};
    const float most = fold(larger(size(parts[0]), size(parts[1])), larger)[0];
    const bool some = most > 1e-36f;  // what is smaller has no inverse
    const float inverse = some ? 127.0f / most : 0.0f;
    Rounded made;
    made.scale = some ? most / 127.0f : 0.0f;
    for (int half = 0; half < 2; half++) {
        const auto whole = (Lanes<BLOCK / 2>::i)(parts[half] * inverse + to_whole) - 0x4b400000;  // its bits
        place(made, half, __builtin_convertvector(whole, Bytes));
        made.sums[half] = fold(whole, [](auto a, auto b) { return a + b; })[0];
    }
    made.sums[2] = made.sums[0] + made.sums[1];
    std::memcpy((void*)x, &made, offsetof(Rounded, unused));
}

}  // namespace

void round_row_to_bytes(float* x, int count) {
    for (int i = 0; i < count; i += BLOCK) round_block(x + i);
}

int byte_panels(int tokens) { return panels_for(tokens); }

const ByteKernels* byte_kernels(int32_t kind) {
    switch (kind) {
        case Q8_0: return &byte_kernels_of<StoreBlocks<8, 128, false>>;
        case Q4_0: return &byte_kernels_of<StoreBlocks<4, 8, false>>;
        case Q4_1: return &byte_kernels_of<StoreBlocks<4, 0, true>>;
        default: return byte_kernels_k(kind);
    }
}

void byte_products(int32_t kind, const uint8_t* weights, int panels, const float* x, int ldx, int tokens, int inputs,
                   float* acc, const uint8_t* next) {
#if defined(__AVX512F__)
    if (!has_byte_dots)
        return avx2::byte_products(kind, weights, panels, x, ldx, tokens, inputs, acc, next);
#endif
    const ByteKernels& kernels = *byte_kernels(kind);
    const Format& f = format(kind);
    const size_t panel_bytes = f.bytes_of(inputs);
    const Cut cut(tokens, BYTE_TOKENS);
    const int stride = panels * PANEL;
    for (int tile = 0; tile < cut.count; tile++) {
        const int t = cut(tile), m = cut(tile + 1) - t, step = tile ? 0 : f.bytes_of(f.unit);
        const float* from = x + (size_t)t * ldx;
        float* to = acc + t * stride;
        if (BYTE_PANELS[m] == panels) {
            kernels.several[m](weights, panel_bytes, from, ldx, inputs, to, stride, {next, panels * step});
            continue;
        }
        for (int i = 0; i < panels; i++)  // the last of a matrix, or a tile with one token less than the others
            kernels.single[m](weights + i * panel_bytes, panel_bytes, from, ldx, inputs, to + i * PANEL, stride,
                              {next + i * panel_bytes, step});
    }
}

}  // namespace paceline::PACELINE_ISA
