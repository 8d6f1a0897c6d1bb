// The pass: a range of layers in place over hidden states, final norm and head; and the table of an instruction set.
// One parallel region per call; its steps (team.h) spread tokens, outputs or heads, never a sum.
#include <algorithm>
#include <cmath>

#include <omp.h>

#include "kernels.h"
#include "vectors.h"

namespace paceline::PACELINE_ISA {
namespace {

// HF's order: x * 1/sqrt(mean(x^2) + eps), then times the weight.
void rms_norm(const float* x, const float* weight, int size, float epsilon, float* y) {
    vf squares[4] = {};
    int d = 0;
    for (; d + 4 * LANES <= size; d += 4 * LANES)
        for (int i = 0; i < 4; i++) {
            const vf v = load<vf>(x + d + i * LANES);
            squares[i] = fma(v, v, squares[i]);
        }
    float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    for (; d < size; d++) total += x[d] * x[d];
    const float factor = 1.0f / std::sqrt(total / size + epsilon);
    for (int i = 0; i < size; i++) y[i] = weight[i] * (x[i] * factor);
}

void norm_rows(Team& team, const Model& model, const float* weight, const float* hidden, int tokens, float* x, int ldx) {
    team.each(tokens, 4, [&](int t, int) {
        const float* from = hidden + (size_t)t * model.hidden;
        float* to = x + (size_t)t * ldx;
        if (weight)
            rms_norm(from, weight, model.hidden, model.epsilon, to);
        else
            std::memcpy(to, from, sizeof(float) * model.hidden);
    });
}

// Rotates one head: HF's rotate_half, dimension i pairs with i + half.
void rope(const float* head, const float* cosine, const float* sine, int half, float* to) {
    for (int i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half];
        to[i] = a * cosine[i] - b * sine[i];
        to[i + half] = b * cosine[i] + a * sine[i];
    }
}

// Query and key norms (Qwen3), rotation; queries stay in `qkv`, keys and values go to the cache.
void rotate_and_cache(Team& team, const Model& model, const Layer& layer, const Pass& pass, int index, float* qkv,
                      int ldq) {
    const int dims = model.head_dim, rotated = model.heads + model.kv_heads, all = rotated + model.kv_heads;
    team.each(pass.tokens * all, all, [&](int i, int) {
        const int t = i / all, head = i % all;
        float* x = qkv + (size_t)t * ldq + head * dims;
        const bool query = head < model.heads, value = head >= rotated;
        const int kv = value ? head - rotated : head - model.heads;
        float* to = query ? x : pass.cache + index * pass.layer_stride + (value ? pass.value_stride : 0) +
                                    pass.row[t] * pass.row_stride + kv * pass.head_stride +
                                    (size_t)pass.slot[t] * dims;
        const float* weight = query ? layer.query_norm : layer.key_norm;
        if (!value && weight) rms_norm(x, weight, dims, model.epsilon, x);
        const size_t angles = (size_t)pass.position[t] * (dims / 2);
        if (value)
            std::memcpy(to, x, sizeof(float) * dims);
        else
            rope(x, pass.cosine + angles, pass.sine + angles, dims / 2, to);
    });
}

struct Buffers {  // inside the workspace, each row with the stride its GEMM wants
    int ldx, ldq, lda, ldi;
    float *x, *qkv, *attended, *inner, *parts;
    size_t floats;

    Buffers(const Model& model, const Pass& pass) {
        const int heads = model.heads * model.head_dim, kv = model.kv_heads * model.head_dim;
        ldx = row_stride(model.hidden), lda = row_stride(heads);
        ldq = round_up(heads + 2 * kv, PANEL), ldi = row_stride(model.inner);
        float* at = pass.workspace;
        auto take = [&](size_t count) { return at += (count + 15) / 16 * 16, at - (count + 15) / 16 * 16; };
        x = take((size_t)pass.tokens * ldx);
        qkv = take((size_t)pass.tokens * ldq);
        attended = take((size_t)pass.tokens * lda);
        inner = take((size_t)pass.tokens * ldi);
        parts = take(attention_floats(model, pass));
        floats = at - pass.workspace;
        // Inputs beyond the matrix's own have zero weights, but must be numbers.
        if ((model.hidden | heads | model.inner) % BLOCK && pass.workspace)
            std::memset(pass.workspace, 0, sizeof(float) * (parts - pass.workspace));
    }
};

size_t workspace_floats(const Model& model, const Pass& pass) { return Buffers(model, pass).floats; }

// `run(team)`, by each of the threads of a team that is worth it for so many multiplications.
template <class Run>
void in_parallel(int threads, int64_t multiplications, Run run) {
    threads = team_size(threads, multiplications);
    Progress progress;
#pragma omp parallel num_threads(threads)
    {
        Team team(progress, threads, omp_get_thread_num());
        run(team);
    }
}

void layers(const Model& m, const Pass& p, int first, int last, const uint8_t* skip, float* hidden) {
    if (first >= last) return;
    const Buffers b(m, p);
    int64_t work = 0;
    for (const Matrix* w : {&m.layers[first].qkv, &m.layers[first].gate_up, &m.layers[first].down})
        work += (int64_t)w->outputs * w->inputs * p.tokens * (last - first);
    in_parallel(p.threads, work, [&](Team& team) {
        for (int index = first; index < last; index++) {
            const Layer& layer = m.layers[index];
            if (!skip || !skip[2 * (index - first)]) {
                norm_rows(team, m, layer.attention_norm, hidden, p.tokens, b.x, b.ldx);
                round_inputs(team, layer.qkv, b.x, b.ldx, p.tokens);
                gemm(team, layer.qkv, b.x, b.ldx, p.tokens, b.qkv, b.ldq, STORE);
                rotate_and_cache(team, m, layer, p, index, b.qkv, b.ldq);
                attention(team, m, p, index, b.qkv, b.ldq, b.attended, b.lda, b.parts);
                round_inputs(team, layer.out, b.attended, b.lda, p.tokens);
                gemm(team, layer.out, b.attended, b.lda, p.tokens, hidden, m.hidden, ADD);
            }
            if (!skip || !skip[2 * (index - first) + 1]) {
                norm_rows(team, m, layer.mlp_norm, hidden, p.tokens, b.x, b.ldx);
                round_inputs(team, layer.gate_up, b.x, b.ldx, p.tokens);
                gemm(team, layer.gate_up, b.x, b.ldx, p.tokens, b.inner, b.ldi, SWIGLU);
                round_inputs(team, layer.down, b.inner, b.ldi, p.tokens);
                gemm(team, layer.down, b.inner, b.ldi, p.tokens, hidden, m.hidden, ADD);
            }
        }
    });
}

void head(const Model& m, const float* hidden, int tokens, int threads, float* workspace, float* logits) {
    const int ldx = row_stride(m.hidden);
    if (m.hidden % BLOCK) std::memset(workspace, 0, sizeof(float) * ldx * tokens);
    in_parallel(threads, (int64_t)tokens * m.hidden * m.head.outputs, [&](Team& team) {
        norm_rows(team, m, m.norm, hidden, tokens, workspace, ldx);
        round_inputs(team, m.head, workspace, ldx, tokens);
        gemm(team, m.head, workspace, ldx, tokens, logits, m.head.outputs, STORE);
    });
}

}  // namespace

extern const Kernels kernels;
const Kernels kernels = {packed_bytes, pack_row, unpack_row, workspace_floats, layers, head, multiply_add,
                         multiply_add_pairs, read};

}  // namespace paceline::PACELINE_ISA
