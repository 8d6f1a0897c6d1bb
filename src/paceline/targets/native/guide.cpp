// The guide of the drafter trigram: `Guide.forward` of drafters/trigram/guide.py, for a few positions.
#include "guide.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "vectors.h"

namespace paceline::PACELINE_ISA {
namespace {

constexpr int FEATURES = 4;        // of which a candidate's logit has three; the last is the logit of none of them
constexpr double LEAST = 1e-4;     // of a probability whose logarithm is taken
constexpr float EPSILON = 1e-5f;   // of norms

float sum_of(wf lanes) {
    float total = 0;
    for (int i = 0; i < WIDE; i++) total += lanes[i];
    return total;
}

float dot(const float* x, const float* y, int size) {
    wf sums = {};
    int i = 0;
    for (; i + WIDE <= size; i += WIDE) sums = fma(load<wf>(x + i), load<wf>(y + i), sums);
    float total = sum_of(sums);
    for (; i < size; i++) total += x[i] * y[i];
    return total;
}

wf widened(const int8_t* from) { return __builtin_convertvector(load<wb>(from), wf); }

float dot(const float* x, const int8_t* row, int size) {
    wf sums[2] = {};
    int i = 0;
    for (; i + 2 * WIDE <= size; i += 2 * WIDE)
        for (int part = 0; part < 2; part++)
            sums[part] = fma(load<wf>(x + i + part * WIDE), widened(row + i + part * WIDE), sums[part]);
    float total = sum_of(sums[0] + sums[1]);
    for (; i < size; i++) total += x[i] * row[i];
    return total;
}

// y = x / rms(x); may work in place.
void normed(const float* x, int size, float* y) {
    const float factor = 1.0f / std::sqrt(dot(x, x, size) / size + EPSILON);
    for (int i = 0; i < size; i++) y[i] = x[i] * factor;
}

void product(const Matrix& w, float* x, int ldx, int count, float* y, int ldy) {  // overwrites x
    for (int row = 0; row < count; row++) round_row(w, x + (size_t)row * ldx);
    gemm_share(w, x, ldx, count, y, ldy, STORE, 0, 1);
}

void prefetch_rows(const Guide& g, const Successors& found) {
    for (int place = 0; place < found.size; place++) {
        const int8_t* row = g.outputs + found.tokens[place] * g.stride;
        for (int i = 0; i < g.hidden; i += 64) __builtin_prefetch(row + i);
    }
}

void enter(const Guide& g, const float* hidden, int64_t token, float* entered) {
    normed(hidden, g.hidden, entered);
    const int8_t* row = g.embeddings + token * g.stride;
    for (int i = 0; i < g.hidden; i++) entered[g.hidden + i] = row[i];
    normed(entered + g.hidden, g.hidden, entered + g.hidden);
}

void choose(const Guide& g, const float* query, const float* weights, Successors& found) {
    double logits[MOST_SUCCESSORS], most = weights[FEATURES - 1];
    for (int place = 0; place < found.size; place++) {
        const int64_t candidate = found.tokens[place];
        const double p = found.probs[place];
        logits[place] = weights[0] * std::log(std::max(p, LEAST)) + weights[1] * p + weights[2] * found.own[place];
        if (candidate < g.tokens)
            logits[place] += g.units[candidate] * dot(query, g.outputs + candidate * g.stride, g.hidden);
        most = std::max(most, logits[place]);
    }
    double total = std::exp(weights[FEATURES - 1] - most);
    for (int place = 0; place < found.size; place++) total += logits[place] = std::exp(logits[place] - most);
    for (int place = 0; place < found.size; place++) found.probs[place] = logits[place] / total;
}

}  // namespace

void guide(const Guide& g, const float* const* hidden, const int64_t* tokens, Successors* found, int count) {
    const int enters = row_stride(2 * g.hidden), thinks = row_stride(g.rank), asks = row_stride(g.rank + g.inner),
              answers = row_stride(g.hidden);
    float* const entered = g.workspace;
    float* const normal = entered + (size_t)GUIDED * enters;
    float* const joined = normal + (size_t)GUIDED * thinks;  // [state | thought]
    float* const queries = joined + (size_t)GUIDED * asks;
    Successors* chosen[GUIDED];
    int rows = 0;
    for (int at = 0; at < count; at++) {
        if (!hidden[at] || tokens[at] < 0 || tokens[at] >= g.tokens || !found[at].size) continue;
        if (rows == 0) prefetch_rows(g, found[at]);
        enter(g, hidden[at], tokens[at], entered + (size_t)rows * enters);
        chosen[rows++] = found + at;
    }
    if (!rows) return;
    float weights[GUIDED][FEATURES];
    product(g.enter, entered, enters, rows, joined, asks);
    for (int row = 0; row < rows; row++) normed(joined + (size_t)row * asks, g.rank, normal + (size_t)row * thinks);
    product(g.think, normal, thinks, rows, joined + g.rank, asks);
    for (int row = 0; row < rows; row++) {
        float* const thought = joined + (size_t)row * asks + g.rank;
        for (int i = 0; i < g.inner; i++) thought[i] /= 1 + std::exp(-thought[i]);
        for (int i = 0; i < FEATURES; i++)
            weights[row][i] = dot(g.weigh + i * g.inner, thought, g.inner) + g.weigh_bias[i];
    }
    product(g.ask, joined, asks, rows, queries, answers);  // the thoughts are gone now
    for (int row = 0; row < rows; row++) {
        if (row + 1 < rows) prefetch_rows(g, *chosen[row + 1]);
        choose(g, queries + (size_t)row * answers, weights[row], *chosen[row]);
    }
}

void round_row(const float* row, int size, int8_t* to, float& unit) {
    wf most = {};
    int i = 0;
    for (; i + WIDE <= size; i += WIDE) {
        const wf values = load<wf>(row + i), sizes = values < 0.0f ? -values : values;
        most = sizes > most ? sizes : most;
    }
    float largest = 1e-30f;
    for (int lane = 0; lane < WIDE; lane++) largest = std::max(largest, most[lane]);
    for (int k = i; k < size; k++) largest = std::max(largest, std::abs(row[k]));
    unit = largest / 127;
    const float factor = 127 / largest;
    for (i = 0; i + WIDE <= size; i += WIDE) {
        wf values = load<wf>(row + i) * factor;
        values += values < 0.0f ? wf{} - 0.5f : wf{} + 0.5f;
        const wb bytes = __builtin_convertvector(values, wb);
        std::memcpy(to + i, &bytes, sizeof bytes);
    }
    for (; i < size; i++) to[i] = (int8_t)std::lround(row[i] * factor);
}

}  // namespace paceline::PACELINE_ISA
