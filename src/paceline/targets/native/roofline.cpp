// What one core can do at best: the two loops that the roofline of a pass is measured by.
#include "kernels.h"
#include "vectors.h"

namespace paceline::PACELINE_ISA {

// Independent chains, two for each cycle of a multiply-add's latency and unit, in registers. Returns the operations.
double multiply_add(int64_t turns) {
    constexpr int chains = 12;
    wf a[chains] = {};
    const wf factor = splat<wf>(0.999f), term = splat<wf>(0.001f);
    for (int64_t turn = 0; turn < turns; turn++)
#pragma GCC unroll 12
        for (int i = 0; i < chains; i++) a[i] = keep(fma(a[i], factor, term));
    volatile float result = 0;
    for (int i = 0; i < chains; i++) result = result + a[i][0];
    return 2.0 * turns * chains * WIDE;
}

// The same of products of bfloat16, each lane of a factor being two of them; of floats where the processor has no such.
double multiply_add_pairs(int64_t turns) {
#if defined(__AVX512BF16__)
    if (has_bfloat16_dots) {
        constexpr int chains = 12;
        wf a[chains] = {};
        const wf half = (wf)_mm512_set1_epi32(0x3f003f00);
        for (int64_t turn = 0; turn < turns; turn++)
#pragma GCC unroll 12
            for (int i = 0; i < chains; i++)
                a[i] = keep((wf)_mm512_dpbf16_ps((__m512)a[i], (__m512bh)half, (__m512bh)half));
        volatile float result = 0;
        for (int i = 0; i < chains; i++) result = result + a[i][0];
        return 4.0 * turns * chains * WIDE;
    }
#endif
    return multiply_add(turns);
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
