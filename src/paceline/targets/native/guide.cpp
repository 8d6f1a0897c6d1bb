// The guide of the drafter trigram: `Guide.forward` of drafters/trigram/guide.py, for one position.
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

void product(const Matrix& w, float* x, float* y) {  // overwrites x
    round_row(w, x);
    gemm_share(w, x, row_stride(w.inputs), 1, y, w.outputs, STORE, 0, 1);
}

}  // namespace

void guide(const Guide& g, const float* hidden, int64_t token, Successors& found) {
    float* const entered = g.workspace;
    float* const normal = entered + row_stride(2 * g.hidden);
    float* const joined = normal + row_stride(g.rank);  // [state | thought]
    float* const query = joined + row_stride(g.rank + g.inner);
    float* const thought = joined + g.rank;
    if (token < 0 || token >= g.tokens || !found.size) return;
    for (int place = 0; place < found.size; place++) {
        const int8_t* row = g.outputs + found.tokens[place] * g.stride;
        for (int i = 0; i < g.hidden; i += 64) __builtin_prefetch(row + i);
    }
    normed(hidden, g.hidden, entered);
    const int8_t* row = g.embeddings + token * g.stride;
    for (int i = 0; i < g.hidden; i++) entered[g.hidden + i] = row[i];
    normed(entered + g.hidden, g.hidden, entered + g.hidden);
    product(g.enter, entered, joined);
    normed(joined, g.rank, normal);
    product(g.think, normal, thought);
    for (int i = 0; i < g.inner; i++) thought[i] /= 1 + std::exp(-thought[i]);
    float weights[FEATURES];
    for (int i = 0; i < FEATURES; i++) weights[i] = dot(g.weigh + i * g.inner, thought, g.inner) + g.weigh_bias[i];
    product(g.ask, joined, query);  // the thought is gone now
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
