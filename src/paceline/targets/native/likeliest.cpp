// The likeliest token of each row, without its logits.
//
// With inputs x in blocks of 8 bits, and weights w in blocks, products take a fraction of the time (int8.cpp). How far
// one may be off is known (Cauchy and Schwarz): by |w| |x - its blocks| + |w - its blocks| |x's blocks|, and by the
// rounding of sums. So they tell which panels may have the largest logit. Those few are computed as gemm.cpp does, to
// the same bits, and the largest of them is the largest of all. A factor rounds them a last time, which may make two of
// them equal, but by much less than sums are thought to be off.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "int8.h"
#include "kernels.h"
#include "tiles.h"

namespace paceline::PACELINE_ISA {
namespace {

constexpr float ROUNDING = 0x1p-22f;  // of a sum with a bias far above the products: theirs and the rough one's
constexpr float SMALLEST = 1e-36f;  // near the end of their range floats are rounded by more than 2^-24 of them

using Floats = Lanes<PANEL>::f;     // of panels
using Sums = std::array<double, BLOCK>;  // of squares, which may be too small or large for floats

double root_of_all(const Sums& sums) { return std::sqrt(std::accumulate(sums.begin(), sums.end(), 0.0)); }

struct Margins {
    float length, off;  // how far a product may be from gemm.cpp's, by the length of its row, and by how far that is off
};

// Where `rounded` is read for x. Sums are off by less than 2^-24 an operation, on both sides, of numbers that minima and
// digits make some times as large as weights.
Margins margins_of(const float* x, const float* rounded, int inputs) {
    Sums off{}, all{};
    for (int k = 0; k < inputs; k += BLOCK) {
        const auto& block = *(const Rounded*)(rounded + k);
        for (int i = 0; i < BLOCK; i++) {
            const double input = x[k + i], wrong = input - (double)block.scale * block.by[0][i];
            off[i] += wrong * wrong;
            all[i] += input * input;
        }
    }
    const double wrong = 1.001 * root_of_all(off), length = 1.001 * root_of_all(all);
    return {(float)(wrong + (1e-4 + inputs * 0x1p-22) * length), (float)(wrong + length)};
}

bool all_below(Floats values, float limit) {
    return fold((Lanes<PANEL>::i)(values < Floats{} + limit), [](auto a, auto b) { return a & b; })[0];
}

// What products in bytes say of a row: of each panel, between which numbers its largest sum lies.
struct Peaks {
    const float* const peak;
    const Rough& rough;
    const Margins margins;

    Floats high(int panel) const { return load<Floats>(peak + panel) + off(panel); }
    Floats low(int panel) const { return load<Floats>(peak + panel) - off(panel); }

    // The panel whose lower end is highest.
    int most_certain(int panels) const {
        Floats most = low(0);
        Lanes<PANEL>::i at = {};
        for (int i = PANEL; i < panels; i += PANEL) {
            const int from = std::min(i, panels - PANEL);
            const Floats next = low(from);
            at = next > most ? Lanes<PANEL>::i{} + from : at;
            most = next > most ? next : most;
        }
        int lane = 0;
        for (int i = 1; i < PANEL; i++)
            if (most[i] > most[lane]) lane = i;
        return at[lane] + lane;
    }

  private:
    Floats off(int panel) const {
        const Floats sum = load<Floats>(peak + panel), size = sum < 0.0f ? -sum : sum;
        Floats off = margins.length * load<Floats>(rough.lengths + panel) + size * ROUNDING + SMALLEST;
        if (rough.off) off += margins.off * load<Floats>(rough.off + panel);
        return off;
    }
};

}  // namespace

float panel_length(const Matrix& w, int panel) {
    const Format& f = format(w.kind, w.near);
    const int inputs = round_up(w.inputs, BLOCK);
    const uint8_t* weights = w.data + (size_t)panel * (inputs / f.block) * f.bytes;
    alignas(64) float floats[BLOCK * PANEL];
    std::array<double, PANEL> squares{};
    for (int k = 0; k < inputs; k += BLOCK) {
        f.expand(weights, k, BLOCK, floats);
        for (int i = 0; i < BLOCK * PANEL; i++) squares[i % PANEL] += (double)floats[i] * floats[i];
    }
    return 1.001 * std::sqrt(*std::max_element(squares.begin(), squares.end()));
}

size_t likeliest_floats(const Matrix& w, int tokens) {
    return (size_t)tokens * (row_stride(w.inputs) + panels_of(w) + 2);
}

void likeliest_rows(Team& team, const Matrix& w, const Rough& rough, float scale, const float* x, int ldx, int tokens,
                    float* workspace, int64_t* likeliest) {
    const int panels = panels_of(w), inputs = round_up(w.inputs, BLOCK), ldr = row_stride(w.inputs);
    float *const rounded = workspace, *const peaks = rounded + (size_t)tokens * ldr;
    Margins* const margins = (Margins*)(peaks + (size_t)tokens * panels);
    Matrix blocks = *rough.matrix;
    blocks.input_kind = Q8_0, blocks.bias = w.bias;
    team.each(tokens, 1, [&](int t, int) {
        const float* row = x + (size_t)t * ldx;
        float* to = rounded + (size_t)t * ldr;
        std::copy_n(row, inputs, to);
        round_row_to_bytes(to, inputs);
        margins[t] = margins_of(row, to, inputs);
    });
    gemm(team, blocks, rounded, ldr, tokens, peaks, panels, PEAKS);
    team.each(tokens, 1, [&](int t, int) {
        const float* const row = x + (size_t)t * ldx;
        const Peaks found{peaks + (size_t)t * panels, rough, margins[t]};
        // The largest so far, with the factor and without.
        float most = -std::numeric_limits<float>::infinity(), least = most;
        likeliest[t] = 0;
        const auto compute = [&](int panel) {
            alignas(64) float sums[PANEL];
            gemm_panel(w, panel, row, sums);
            for (int i = 0; i < std::min(PANEL, w.outputs - panel * PANEL); i++) {
                const float logit = sums[i] * scale;
                const int at = panel * PANEL + i;
                if (logit > most || (logit == most && at < likeliest[t])) most = logit, likeliest[t] = at;
                least = std::max(least, sums[i]);
            }
        };
        if (panels < PANEL) {
            for (int panel = 0; panel < panels; panel++) compute(panel);
            return;
        }
        const int best = found.most_certain(panels);
        compute(best);  // first, as it leaves few others
        for (int i = 0; i < panels; i += PANEL) {
            const int from = std::min(i, panels - PANEL);
            const Floats high = found.high(from);
            if (all_below(high, least)) continue;
            for (int lane = 0; lane < PANEL; lane++)  // also what is no number
                if (from + lane != best && !(high[lane] < least)) compute(from + lane);
        }
    });
}

}  // namespace paceline::PACELINE_ISA
