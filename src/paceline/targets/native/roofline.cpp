// What one core can do at best: the loops that the roofline of a pass is measured by.
#include "amx.h"
#include "int8_kernel.h"
#include "kernels.h"
#include "vectors.h"

namespace paceline::PACELINE_ISA {

namespace {

constexpr int CHAINS = 12;

// Independent chains, two for each cycle of a multiply-add's latency and unit, in registers: `step(chain)`.
template <class V, class Step>
void run_chains(int64_t turns, Step step) {
    V a[CHAINS] = {};
    for (int64_t turn = 0; turn < turns; turn++)
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) a[i] = keep(step(a[i]));
#pragma GCC unroll 12
    for (int i = 1; i < CHAINS; i++) a[0] += a[i];
    volatile float result = a[0][0];
    (void)result;
}

}  // namespace

// Products and sums: of floats; of bfloat16, two to a lane, or in tiles; of bytes, four to a lane. Of floats as well where the
// processor has no others. Returns how many operations that were.
double multiply_add(int64_t turns, [[maybe_unused]] int32_t input_kind) {
    const double floats = 2.0 * turns * CHAINS * WIDE;
    if (input_kind == BF16 && use_tiles) return tile_multiply_add(turns);
#if defined(__AVX512BF16__)
    if (input_kind == BF16 && has_bfloat16_dots) {
        const __m512bh half = (__m512bh)_mm512_set1_epi32(0x3f003f00);
        run_chains<wf>(turns, [&](wf a) { return (wf)_mm512_dpbf16_ps((__m512)a, half, half); });
        return 2 * floats;
    }
#endif
#if defined(__AVX2__)
    if (input_kind == Q8_0 && (WIDE == 8 || has_byte_dots)) {
        alignas(64) int8_t ones[4] = {1, 1, 1, 1};
        const wu four = {};
        run_chains<wi>(turns, [&](wi a) { return Products<4>::add<1>(&a, &four, ones), a; });
        return 4 * floats;
    }
#endif
    const wf factor = splat<wf>(0.999f), term = splat<wf>(0.001f);
    run_chains<wf>(turns, [&](wf a) { return fma(a, factor, term); });
    return floats;
}

// Adds all numbers up, so that each is read; four lines at a time.
float read(const float* from, size_t count) {
    constexpr int lines = 4;
    wf total[lines * VECTORS] = {};
    for (size_t i = 0; i + lines * PANEL <= count; i += lines * PANEL)
#pragma GCC unroll 8
        for (int j = 0; j < lines * VECTORS; j++) {
            if (j % VECTORS == 0) __builtin_prefetch(from + i + j * WIDE + 1024);
            total[j] += load<wf>(from + i + j * WIDE);
        }
    for (int j = 1; j < lines * VECTORS; j++) total[0] += total[j];
    return total[0][0];
}

}  // namespace paceline::PACELINE_ISA
