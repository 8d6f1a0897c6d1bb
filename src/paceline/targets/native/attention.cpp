// Attention of every new token over its own list of cache slots (a shared prefix, then a path through the draft tree).
//
// Blocking. The list is cut into chunks of 128 entries by list index. A chunk's softmax is computed alone: its maximum
// m, the sum s of e^(score - m) and the values weighted by it; chunks are then folded together in list order. So a
// token's result depends only on what stands in its list. Narrow passes spread (token, heads, chunk) over the threads
// and fold afterwards; wide ones give a thread 8 tokens x the heads of one key/value head and go through the
// cache chunk by chunk (it then stays in L2), folding at once. Up to 4 query heads share each key and value they load;
// scores take 4 keys at a time, values 32 of their dimensions.
#include <algorithm>
#include <limits>

#include "native.h"

namespace paceline {
namespace {

constexpr int CHUNK = 128, HEADS = 4, TOKENS = 8, MAX_HEAD_DIM = 256;

struct Heads {  // query heads first .. first + count - 1 read key/value head `kv`
    int kv, first, count;
};

struct Part {  // softmax over a part of the list, not yet divided by `s`
    float m[HEADS], s[HEADS], values[HEADS][MAX_HEAD_DIM];
};

// A key/value head's groups of query heads are cut evenly into at most HEADS each.
inline int groups_per_kv(const Model& model) { return (model.heads / model.kv_heads + HEADS - 1) / HEADS; }

inline Heads heads_of(const Model& model, int group) {
    const int shared = model.heads / model.kv_heads, groups = groups_per_kv(model);
    const int kv = group / groups, i = group % groups, from = shared * i / groups;
    return {kv, kv * shared + from, shared * (i + 1) / groups - from};
}

// WHOLE: head_dim is a multiple of 8; otherwise the last vector is read up to the end of the head only.
template <bool WHOLE>
inline vf load_dims(const float* p, int d, int dims) {
    if (WHOLE || d + LANES <= dims) return load<vf>(p + d);
    vf v = {};
    std::memcpy(&v, p + d, sizeof(float) * (dims - d));
    return v;
}

#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, vi{__VA_ARGS__})
#endif

// The sums of the lanes of four vectors.
inline void store_sums(float* to, const vf* v) {
    vf ab = PICK(v[0], v[1], 0, 8, 2, 10, 4, 12, 6, 14) + PICK(v[0], v[1], 1, 9, 3, 11, 5, 13, 7, 15);
    vf cd = PICK(v[2], v[3], 0, 8, 2, 10, 4, 12, 6, 14) + PICK(v[2], v[3], 1, 9, 3, 11, 5, 13, 7, 15);
    vf all = PICK(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + PICK(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    all += PICK(all, all, 4, 5, 6, 7, 4, 5, 6, 7);
    std::memcpy(to, &all, 4 * sizeof(float));
}

template <int G, bool WHOLE>
void score(const float* q, int dims, const float* keys, const int32_t* slots, int count, float (*scores)[CHUNK]) {
    for (int j = 0; j < count; j += 4) {
        const float* key[4];
        for (int i = 0; i < 4; i++) key[i] = keys + (size_t)slots[std::min(j + i, count - 1)] * dims;
        vf a[G * 4] = {};
        for (int d = 0; d < dims; d += LANES) {
            vf query[G];
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) query[g] = keep(load_dims<WHOLE>(q + g * dims, d, dims));
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                vf k = keep(load_dims<WHOLE>(key[i], d, dims));
#pragma GCC unroll 4
                for (int g = 0; g < G; g++) a[g * 4 + i] = fma(query[g], k, a[g * 4 + i]);
            }
        }
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) store_sums(scores[g] + j, a + g * 4);
    }
}

template <int G, int N, bool WHOLE>
void weigh(const float (*weights)[CHUNK], int d, int dims, const float* values, const int32_t* slots, int count,
           Part& part) {
    vf a[G * N] = {};
    for (int j = 0; j < count; j++) {
        const float* value = values + (size_t)slots[j] * dims;
        vf weight[G];
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) weight[g] = splat(weights[g][j]);
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) {
            vf v = keep(load_dims<WHOLE>(value, d + i * LANES, dims));
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) a[g * N + i] = fma(weight[g], v, a[g * N + i]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < G * N; i++) store(part.values[i / N] + d + i % N * LANES, a[i]);
}

// Scores to weights e^(scale * (score - maximum)), in place; m is the scaled maximum.
void soften(float* scores, int count, float scale, float& m, float& s) {
    for (int j = count; j % LANES; j++) scores[j] = scores[count - 1];
    vf most = load<vf>(scores), total = {};
    for (int j = 0; j < count; j += LANES) {
        vf next = load<vf>(scores + j);
        most = next > most ? next : most;
    }
    float highest = most[0];
    for (int i = 1; i < LANES; i++) highest = std::max(highest, most[i]);
    m = highest * scale;
    for (int j = 0; j < count; j += LANES) {
        vf weight = exp((load<vf>(scores + j) - splat(highest)) * splat(scale));
        store(scores + j, weight);
        if (count - j >= LANES)
            total += weight;
        else
            for (int i = 0; i < count - j; i++) total[i] += weight[i];
    }
    s = sum(total);
}

template <int G, bool WHOLE>
void attend_heads(const Model& model, const float* q, const float* keys, const float* values, const int32_t* slots,
                  int count, Part& part) {
    alignas(64) float scores[G][CHUNK];
    const int dims = model.head_dim;
    score<G, WHOLE>(q, dims, keys, slots, count, scores);
    for (int g = 0; g < G; g++) soften(scores[g], count, model.scale, part.m[g], part.s[g]);
    int d = 0;
    for (; d + 4 * LANES <= dims; d += 4 * LANES) weigh<G, 4, WHOLE>(scores, d, dims, values, slots, count, part);
    for (; d < dims; d += LANES) weigh<G, 1, WHOLE>(scores, d, dims, values, slots, count, part);
}

inline int listed(const Pass& pass, int t) {
    return pass.prefix[t] + pass.extra_start[t + 1] - pass.extra_start[t];
}

inline int chunks(const Pass& pass, int t) { return (listed(pass, t) + CHUNK - 1) / CHUNK; }

void attend(const Model& model, const Pass& pass, int layer, int t, Heads heads, int chunk, const float* q, int ldq,
            Part& part) {
    int32_t slots[CHUNK];
    const int from = chunk * CHUNK, count = std::min(CHUNK, listed(pass, t) - from), prefix = pass.prefix[t];
    for (int j = 0; j < count; j++)
        slots[j] = from + j < prefix ? from + j : pass.extra[pass.extra_start[t] + from + j - prefix];
    const float* keys = pass.cache + layer * pass.layer_stride + pass.row[t] * pass.row_stride +
                        heads.kv * pass.head_stride;
    const float* values = keys + pass.value_stride;
    q += (size_t)t * ldq + heads.first * model.head_dim;
    const bool whole = model.head_dim % LANES == 0;
    switch (heads.count * 2 + whole) {
        case 2: return attend_heads<1, false>(model, q, keys, values, slots, count, part);
        case 3: return attend_heads<1, true>(model, q, keys, values, slots, count, part);
        case 4: return attend_heads<2, false>(model, q, keys, values, slots, count, part);
        case 5: return attend_heads<2, true>(model, q, keys, values, slots, count, part);
        case 6: return attend_heads<3, false>(model, q, keys, values, slots, count, part);
        case 7: return attend_heads<3, true>(model, q, keys, values, slots, count, part);
        case 8: return attend_heads<4, false>(model, q, keys, values, slots, count, part);
        default: return attend_heads<4, true>(model, q, keys, values, slots, count, part);
    }
}

void fold(Part& state, const Part& part, int heads, int dims) {
    for (int g = 0; g < heads; g++) {
        float m = std::max(state.m[g], part.m[g]);
        vf old = exp(splat(state.m[g] - m)), next = exp(splat(part.m[g] - m));
        state.m[g] = m;
        state.s[g] = state.s[g] * old[0] + part.s[g] * next[0];
        for (int d = 0; d < dims; d += LANES)
            store(state.values[g] + d,
                  fma(next, load<vf>(part.values[g] + d), old * load<vf>(state.values[g] + d)));
    }
}

void finish(const Part& state, Heads heads, int dims, float* out) {
    for (int g = 0; g < heads.count; g++) {
        float* to = out + (heads.first + g) * dims;
        const float share = 1.0f / state.s[g];
        for (int d = 0; d < dims; d++) to[d] = state.values[g][d] * share;
    }
}

inline int longest(const Pass& pass) {
    int most = 0;
    for (int t = 0; t < pass.tokens; t++) most = std::max(most, chunks(pass, t));
    return most;
}

inline bool narrow(const Model& model, const Pass& pass) {
    return (int64_t)pass.tokens * model.kv_heads <= 16 * pass.threads;
}

}  // namespace

size_t attention_floats(const Model& model, const Pass& pass) {
    if (!narrow(model, pass)) return 0;
    size_t groups = (size_t)model.kv_heads * groups_per_kv(model);
    return groups * pass.tokens * longest(pass) * (sizeof(Part) / sizeof(float));
}

void attention(Team& team, const Model& model, const Pass& pass, int layer, const float* q, int ldq, float* out,
               int ldo, float* workspace) {
    const int groups = model.kv_heads * groups_per_kv(model), dims = model.head_dim;
    if (narrow(model, pass)) {
        const int deep = longest(pass), jobs = pass.tokens * groups;
        Part* parts = (Part*)workspace;
        team.each(jobs * deep, 1, [&](int i) {
            const int chunk = i / jobs, t = i % jobs / groups, group = i % groups;
            if (chunk < chunks(pass, t))
                attend(model, pass, layer, t, heads_of(model, group), chunk, q, ldq, parts[i]);
        });
        team.each(jobs, 4, [&](int i) {
            const int t = i / groups;
            for (int chunk = 1; chunk < chunks(pass, t); chunk++)
                fold(parts[i], parts[chunk * jobs + i], heads_of(model, i % groups).count, dims);
            finish(parts[i], heads_of(model, i % groups), dims, out + (size_t)t * ldo);
        });
        return;
    }
    team.each((pass.tokens + TOKENS - 1) / TOKENS * groups, 1, [&](int i) {
        const int first = i / groups * TOKENS, last = std::min(first + TOKENS, pass.tokens);
        const Heads heads = heads_of(model, i % groups);
        alignas(64) Part state[TOKENS], part;
        int deep = 0;
        for (int t = first; t < last; t++) deep = std::max(deep, chunks(pass, t));
        for (int chunk = 0; chunk < deep; chunk++)
            for (int t = first; t < last; t++) {
                if (chunk >= chunks(pass, t)) continue;
                attend(model, pass, layer, t, heads, chunk, q, ldq, chunk ? part : state[t - first]);
                if (chunk) fold(state[t - first], part, heads.count, dims);
            }
        for (int t = first; t < last; t++) finish(state[t - first], heads, dims, out + (size_t)t * ldo);
    });
}

}  // namespace paceline
