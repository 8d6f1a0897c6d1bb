// What happens to rows between the matrix products: norms, activations, rotation. Lanes are floats of a row; what sums
// goes through a row in one order.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "activations.h"
#include "kernels.h"
#include "vectors.h"

namespace paceline::PACELINE_ISA {
namespace {

// The sum of f(x) over a row: four times eight partial sums, then what is left.
template <class F>
inline float sum_over(const float* x, int size, F f) {
    vf sums[4] = {};
    int d = 0;
    for (; d + 4 * LANES <= size; d += 4 * LANES)
        for (int i = 0; i < 4; i++) sums[i] = f(load<vf>(x + d + i * LANES), sums[i]);
    float total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; d < size; d++) total += f(splat<vf>(x[d]), vf{})[0];
    return total;
}

inline float factor(const float* x, int size, float epsilon) {
    const float squares = sum_over(x, size, [](vf v, vf sum) { return fma(v, v, sum); });
    return 1.0f / std::sqrt(squares / size + epsilon);
}

// HF's order: x * 1/sqrt(mean(x^2) + eps), then times the weight. May work in place.
void apply(const Norm& norm, const float* x, int size, float* y) {
    if (norm.centred) {
        const float mean = sum_over(x, size, [](vf v, vf sum) { return sum + v; }) / size;
        for (int i = 0; i < size; i++) y[i] = x[i] - mean;
        x = y;
    }
    const float scale = factor(x, size, norm.epsilon);
    for (int i = 0; i < size; i++) y[i] = norm.weight[i] * (x[i] * scale);
    if (norm.bias)
        for (int i = 0; i < size; i++) y[i] += norm.bias[i];
}

// Rotates one head: HF's rotate_half, dimension i pairs with i + half.
void rope(const float* head, const float* cosine, const float* sine, int half, float* to) {
    for (int i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half];
        to[i] = a * cosine[i] - b * sine[i];
        to[i + half] = b * cosine[i] + a * sine[i];
    }
}

// The norm of head `head`, where they have weights of their own.
Norm of_head(const Model& model, Norm norm, int head) {
    const int from = model.norm_each ? head * model.head_dim : 0;
    norm.weight += from;
    if (norm.bias) norm.bias += from;
    return norm;
}

float largest(const float* x, int count) {
    vf most[4];
    for (vf& lanes : most) lanes = splat<vf>(-std::numeric_limits<float>::infinity());
    int d = 0;
    for (; d + 4 * LANES <= count; d += 4 * LANES)
        for (int i = 0; i < 4; i++) {
            const vf v = load<vf>(x + d + i * LANES);
            most[i] = v > most[i] ? v : most[i];
        }
    float found = -std::numeric_limits<float>::infinity();
    for (const vf& lanes : most)
        for (int i = 0; i < LANES; i++) found = std::max(found, (float)lanes[i]);
    for (; d < count; d++) found = std::max(found, x[d]);
    return found;
}

inline int first_of_the_largest(const float* row, int size) {
    constexpr int PIECE = 256;
    float most = -std::numeric_limits<float>::infinity();
    int from = 0;
    for (int d = 0; d < size; d += PIECE) {
        const float here = largest(row + d, std::min(PIECE, size - d));
        if (here > most) most = here, from = d;
    }
    const float* at = std::find(row + from, row + size, most);
    return at < row + size ? at - row : 0;
}

}  // namespace

void norm_rows(Team& team, const Norm& norm, const float* x, int ldx, int tokens, int size, float* y, int ldy,
               const Matrix* reader) {
    team.each(tokens, 1, [&](int t, int) {
        const float* from = x + (size_t)t * ldx;
        float* to = y + (size_t)t * ldy;
        if (norm.weight)
            apply(norm, from, size, to);
        else
            std::memcpy(to, from, sizeof(float) * size);
        if (!reader) return;
        // What a wider matrix has left there as bytes may be no numbers, and a row in floats is read to its last block.
        if (reader->inputs == size) std::fill(to + size, to + round_up(size, BLOCK), 0.0f);
        round_row(*reader, to);
    });
}

void add_rows(Team& team, const Norm& norm, float scale, float* x, int ldx, int tokens, int size, float* hidden) {
    team.each(tokens, 4, [&](int t, int) {
        float *from = x + (size_t)t * ldx, *to = hidden + (size_t)t * size;
        if (norm.weight) apply(norm, from, size, from);
        for (int i = 0; i < size; i++) to[i] += scale * from[i];
    });
}

void activate_rows(Team& team, const Model& model, const float* wide, int ldw, int tokens, int inner, float* y,
                   int ldy) {
    if (model.activation == CLAMPED_SWIGLU)
        return team.each(tokens, 1, [&](int t, int) {
            const float* from = wide + (size_t)t * ldw;
            for (int i = 0; i < inner; i += LANES)
                store(y + (size_t)t * ldy + i, clamped_swiglu(load<vf>(from + 2 * i), load<vf>(from + 2 * i + LANES),
                                                              model.swiglu_alpha, model.swiglu_limit));
        });
    with_activation(model.activation, [&](auto act) {
        team.each(tokens, 1, [&](int t, int) {
            const float* from = wide + (size_t)t * ldw;
            float* to = y + (size_t)t * ldy;
            for (int i = 0; i < inner; i += LANES) {
                if (model.gated)
                    store(to + i, act(load<vf>(from + 2 * i)) * load<vf>(from + 2 * i + LANES));
                else
                    store(to + i, act(load<vf>(from + i)));
            }
        });
    });
}

void place_heads(Team& team, const Model& model, const Layer& layer, const Pass& pass, int index, float* qkv, int ldq) {
    const int dims = model.head_dim, rotated = model.heads + model.kv_heads, all = rotated + model.kv_heads;
    const int half = model.rotary / 2;
    const bool whole = layer.query_norm.weight && model.norm_whole;
    const Stored& cache = pass.cache[index];
    if (whole)
        team.each(pass.tokens * 2, 1, [&](int i, int) {
            const bool key = i % 2;
            float* x = qkv + (size_t)(i / 2) * ldq + (key ? model.heads * dims : 0);
            apply(key ? layer.key_norm : layer.query_norm, x, (key ? model.kv_heads : model.heads) * dims, x);
        });
    team.each(pass.tokens * all, all, [&](int i, int) {
        const int t = i / all, head = i % all;
        float* x = qkv + (size_t)t * ldq + head * dims;
        const bool query = head < model.heads, value = head >= rotated;
        const int kv = value ? head - rotated : head - model.heads;
        float* to = query ? x : cache.at(value ? cache.values : cache.keys, pass.row[t], kv, dims) +
                                    (size_t)pass.slot[t] * dims;
        if (value) {
            std::memcpy(to, x, sizeof(float) * dims);
            return;
        }
        const Norm norm = of_head(model, query ? layer.query_norm : layer.key_norm, query ? head : kv);
        const bool normed = norm.weight && !whole;
        if (normed && !model.norm_rotated) apply(norm, x, dims, x);
        const size_t angles = (size_t)pass.position[t] * half;
        const int turned = layer.rope < 0 ? 0 : 2 * half;
        if (turned) rope(x, pass.cosine[layer.rope] + angles, pass.sine[layer.rope] + angles, half, to);
        if (to != x) std::memcpy(to + turned, x + turned, sizeof(float) * (dims - turned));
        if (normed && model.norm_rotated) apply(norm, to, dims, to);
    });
}

void cap_scores(float* scores, int count, float scale, float cap) {
    for (int i = 0; i < count; i += LANES)
        store(scores + i, tanh(load<vf>(scores + i) * splat<vf>(scale / cap)) * splat<vf>(cap));
}

void adjust_rows(Team& team, float scale, float cap, int tokens, int size, float* logits) {
    constexpr int PIECE = 4096;
    const int pieces = (size + PIECE - 1) / PIECE;
    team.each(tokens * pieces, 1, [&](int i, int) {
        float* row = logits + (size_t)(i / pieces) * size;
        const int end = std::min(size, (i % pieces + 1) * PIECE);
        for (int d = i % pieces * PIECE; d < end; d += LANES) {
            const int count = std::min(LANES, end - d);
            vf v = {};
            std::memcpy(&v, row + d, sizeof(float) * count);
            v *= splat<vf>(scale);
            if (cap) v = tanh(v / splat<vf>(cap)) * splat<vf>(cap);
            std::memcpy(row + d, &v, sizeof(float) * count);
        }
    });
}

void judge(float* logits, int size, int top, int64_t* likeliest, float* logps, float* entropy) {
    for (int i = 0; i < top; i++) {
        likeliest[i] = first_of_the_largest(logits, size);
        if (!logps) return;  // one, without what it is worth
        logps[i] = logits[likeliest[i]];
        logits[likeliest[i]] = -std::numeric_limits<float>::infinity();
    }
    for (int i = top; i-- > 0;) logits[likeliest[i]] = logps[i];
    const vf most = splat<vf>(logps[0]);
    const float total = sum_over(logits, size, [=](vf v, vf sum) { return sum + exp(v - most); });
    const float weighted = sum_over(logits, size, [=](vf v, vf sum) { return sum + (v - most) * exp(v - most); });
    for (int i = top; i-- > 0;) logps[i] -= logps[0] + std::log(total);
    *entropy = std::log(total) - weighted / total;
}

int draw(const float* scores, int size, float scale, double quantile) {
    constexpr int PIECE = 256;  // as many floats may be summed before doubles are wanted
    constexpr float NOTHING = -80.0f;
    const vf most = splat<vf>(scores[first_of_the_largest(scores, size)]);
    const auto weight = [=](vf v) {
        const vf x = (v - most) * splat<vf>(scale);
        return x < splat<vf>(NOTHING) ? vf{} : exp(x);
    };
    std::vector<float> sums;
    double left = 0;
    for (int from = 0; from < size; from += PIECE) {
        const int count = std::min(PIECE, size - from);
        sums.push_back(sum_over(scores + from, count, [&](vf v, vf sum) { return sum + weight(v); }));
        left += sums.back();
    }
    left *= quantile;
    int piece = 0;
    for (int next = 0; next < (int)sums.size() && left >= 0; next++) {
        if (sums[next] > 0) piece = next;  // of those that it may lie in, the last one
        if (left < sums[next]) break;
        left -= sums[next];
    }
    int token = 0;
    for (int at = piece * PIECE, end = std::min(size, at + PIECE); at < end; at++) {
        const float own = weight(splat<vf>(scores[at]))[0];
        if (own > 0) token = at;
        if (left < own) break;
        left -= own;
    }
    return token;
}

void judge_rows(Team& team, const Pass& pass, int tokens, int size) {
    team.each(tokens, 1, [&](int t, int) {
        judge(pass.logits + (size_t)t * size, size, pass.top, pass.likeliest + (size_t)t * pass.top,
              pass.logps ? pass.logps + (size_t)t * pass.top : nullptr, pass.entropies ? pass.entropies + t : nullptr);
    });
}

}  // namespace paceline::PACELINE_ISA
