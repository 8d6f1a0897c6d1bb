// Matrix products spread over threads, and matrices packed for them: see product.h for the blocking.
#include <algorithm>
#include <array>

#include "formats.h"
#include "kernels.h"
#include "tiles.h"
#include "vectors.h"

namespace paceline::PACELINE_ISA {
namespace {

template <class V>
inline V silu(V x) {
    return x / (splat<V>(1.0f) + exp(-x));
}

// One token's 16 sums of panel `panel` to where they belong.
void finish(const Matrix& w, int panel, const float* acc, float* y, Epilogue epilogue) {
    const int first = panel * PANEL, count = std::min(PANEL, w.outputs - first);
    float sums[PANEL];
    for (int i = 0; i < PANEL; i++) sums[i] = acc[i];
    if (w.bias)
        for (int i = 0; i < count; i++) sums[i] += w.bias[first + i];
    if (epilogue == SWIGLU) return store(y + first / 2, silu(load<vf>(sums)) * load<vf>(sums + PANEL / 2));
    y += first;
    const auto put = [&](int n) {
        for (int i = 0; i < n; i++) y[i] = epilogue == ADD ? y[i] + sums[i] : sums[i];
    };
    if (count == PANEL)
        put(PANEL);  // a constant, for the compiler
    else
        put(count);
}

int panels_of(const Matrix& w) { return (w.outputs + PANEL - 1) / PANEL; }

// Bytes of a panel.
size_t panel_bytes(const Matrix& w) {
    return (size_t)(round_up(w.inputs, BLOCK) / format(w.kind).block) * format(w.kind).bytes;
}

// One of the matrices that a product's outputs come from, one after the other: its jobs, and where its outputs go.
struct Part {
    const Matrix* w;
    float* y;
    size_t panel_bytes;
    int first, together, groups;  // jobs before; panels of a job; jobs a slab of tokens

    const uint8_t* weights(int group) const { return w->data + (size_t)group * together * panel_bytes; }
};

}  // namespace

void gemm(Team& team, const Matrix& w, const float* x, int ldx, int tokens, float* y, int ldy, Epilogue epilogue) {
    const Input in = {x, ldx, tokens, round_up(w.inputs, BLOCK)};
    const Cut slabs(tokens, SLAB);
    std::array<Part, MAX_PARTS> parts;
    int count = 0, jobs = 0;
    for (const Matrix* part = &w; part; part = part->next) {
        const int together = format(part->kind).together(tokens), groups = (panels_of(*part) + together - 1) / together;
        parts[count++] = {part, y, panel_bytes(*part), jobs, together, groups};
        jobs += groups * slabs.count, y += part->outputs;
    }
    const auto part_of = [&](int job) -> const Part& {
        int i = count - 1;
        while (job < parts[i].first) i--;
        return parts[i];
    };
    team.each(jobs, 1, [&](int number, int next) {
        next = std::clamp(next, 0, jobs - 1);
        const Part &part = part_of(number), &after = part_of(next);
        const int slab = (number - part.first) / part.groups, group = (number - part.first) % part.groups;
        const int panel = group * part.together, panels = std::min(part.together, panels_of(*part.w) - panel);
        const int from = slabs(slab), n = slabs(slab + 1) - from;
        alignas(64) float acc[std::max(SLAB * TILING.together, TILING.fused * TILING.panels[1]) * PANEL];
        format(part.w->kind).product(
            in, {part.weights(group), after.weights((next - after.first) % after.groups), panels, from, n}, acc);
        for (int t = 0; t < n; t++)
            for (int i = 0; i < panels; i++)
                finish(*part.w, panel + i, acc + (t * panels + i) * PANEL, part.y + (size_t)(from + t) * ldy, epilogue);
    });
}

size_t packed_bytes(const Matrix& w) { return panels_of(w) * panel_bytes(w); }

void pack_row(const Matrix& w, int output, const uint8_t* row, uint8_t* packed) {
    const Format& f = format(w.kind);
    uint8_t* at = packed + output / PANEL * panel_bytes(w);
    for (int k = 0; k < w.inputs; k += f.block, at += f.bytes)
        f.write(at, row, k, std::min(f.block, w.inputs - k), output % PANEL);
}

void unpack_row(const Matrix& w, int output, float* to) {
    const uint8_t* panel = w.data + output / PANEL * panel_bytes(w);
    float weights[BLOCK * PANEL];
    for (int k = 0; k < w.inputs; k += BLOCK) {
        format(w.kind).expand(panel, k, BLOCK, weights);
        for (int i = 0; i < BLOCK && k + i < w.inputs; i++) to[k + i] = weights[i * PANEL + output % PANEL];
    }
}

}  // namespace paceline::PACELINE_ISA
