// The pass: what enters, a range of layers in place over hidden states, final norm and head; and the table of an
// instruction set. One parallel region per call; its steps (team.h) spread tokens, outputs or heads, never a sum.
#include <algorithm>
#include <cstring>

#include <omp.h>

#include "kernels.h"

namespace paceline::PACELINE_ISA {
namespace {

struct Buffers {  // inside the workspace, each row with the stride its GEMM wants
    int ldx, ldq, lda, ldi, ldw, ldf;
    float *x, *qkv, *attended, *inner, *wide, *fused, *experts, *judged, *parts;
    size_t floats;

    Buffers(const Model& model, const Pass& pass) {
        const int heads = model.heads * model.head_dim, kv = model.kv_heads * model.head_dim;
        ldx = row_stride(model.hidden * (pass.beside || pass.entry.joined ? 2 : 1)), lda = row_stride(heads);
        ldq = round_up(heads + 2 * kv, PANEL), ldi = row_stride(model.inner);
        ldw = wide_stride(model, model.inner), ldf = row_stride(pass.entry.pieces * model.hidden);
        float* at = pass.workspace;
        auto take = [&](size_t count) { return at += (count + 15) / 16 * 16, at - (count + 15) / 16 * 16; };
        x = take((size_t)pass.tokens * ldx);
        qkv = take((size_t)pass.tokens * ldq);
        attended = take((size_t)pass.tokens * lda);
        inner = take((size_t)pass.tokens * ldi);
        wide = take((size_t)pass.tokens * ldw);
        fused = take((size_t)pass.tokens * (pass.entry.fuse.outputs ? ldf : 0));
        experts = take(experts_floats(model, pass.tokens));
        judged = take(pass.rough ? likeliest_floats(model.head, pass.tokens) : 0);
        parts = take(attention_floats(model, pass));
        floats = at - pass.workspace;
        // Inputs beyond the matrix's own have zero weights, but must be numbers.
        if (model.ragged && pass.workspace)
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

// One layer of a pass, for one thread.
class LayerPass {
  public:
    LayerPass(Team& team, const Model& m, const Pass& p, const Buffers& b, int index, float* hidden)
        : team_(team), m_(m), p_(p), b_(b), layer_(m.layers[index]),
          after_(index + 1 < p.last ? &m.layers[index + 1].qkv : p.logits || p.likeliest ? &m.head : nullptr), index_(index),
          hidden_(hidden) {}

    void run(bool attend, bool transform, const float* beside) const {
        if (p_.unread && index_ + 1 == p_.last) return store(beside);
        if (attend) this->attend(beside);
        if (attend && !m_.parallel) add(layer_.out, b_.attended, b_.lda, layer_.attention_post_norm, &layer_.gate_up);
        if (transform) enter_mlp();
        if (attend && m_.parallel) add(layer_.out, b_.attended, b_.lda, layer_.attention_post_norm, &layer_.down);
        if (transform) leave_mlp();
    }

  private:
    // Queries, keys and values; the latter two where later tokens find them.
    void store(const float* beside) const {
        if (beside) norm_rows(team_, Norm(), beside, m_.hidden, p_.tokens, m_.hidden, b_.x + m_.hidden, b_.ldx);
        norm_rows(team_, layer_.attention_norm, hidden_, m_.hidden, p_.tokens, m_.hidden, b_.x, b_.ldx, &layer_.qkv);
        gemm(team_, layer_.qkv, b_.x, b_.ldx, p_.tokens, b_.qkv, b_.ldq, STORE, &layer_.out);
        place_heads(team_, m_, layer_, p_, index_, b_.qkv, b_.ldq);
    }

    void attend(const float* beside) const {
        store(beside);
        attention(team_, m_, p_, index_, b_.qkv, b_.ldq, b_.attended, b_.lda, b_.parts);
        round_inputs(team_, layer_.out, b_.attended, b_.lda, p_.tokens);
    }

    void enter_mlp() const {
        const Matrix& reader = layer_.experts.gate_up ? layer_.experts.router : layer_.gate_up;
        norm_rows(team_, layer_.mlp_norm, hidden_, m_.hidden, p_.tokens, m_.hidden, b_.x, b_.ldx, &reader);
        if (!layer_.gate_up.outputs) return;
        if (swiglu(m_)) {
            gemm(team_, layer_.gate_up, b_.x, b_.ldx, p_.tokens, b_.inner, b_.ldi, SWIGLU, &layer_.down);
        } else {
            gemm(team_, layer_.gate_up, b_.x, b_.ldx, p_.tokens, b_.wide, b_.ldw, STORE, &layer_.down);
            activate_rows(team_, m_, b_.wide, b_.ldw, p_.tokens, layer_.down.inputs, b_.inner, b_.ldi);
        }
        round_inputs(team_, layer_.down, b_.inner, b_.ldi, p_.tokens);
    }

    void leave_mlp() const {
        if (!layer_.experts.gate_up) return add(layer_.down, b_.inner, b_.ldi, layer_.mlp_post_norm, after_);
        experts(team_, m_, layer_, p_.tokens, b_.inner, b_.ldi, b_.experts, b_.x, b_.ldx);
        add_rows(team_, layer_.mlp_post_norm, m_.residual_scale, b_.x, b_.ldx, p_.tokens, m_.hidden, hidden_);
    }

    // hidden += residual_scale * norm(w x): at once, where nothing is to be done on the way.
    void add(const Matrix& w, const float* x, int ldx, const Norm& norm, const Matrix* then) const {
        if (!norm.weight && m_.residual_scale == 1.0f)
            return gemm(team_, w, x, ldx, p_.tokens, hidden_, m_.hidden, ADD, then);
        gemm(team_, w, x, ldx, p_.tokens, b_.x, b_.ldx, STORE, then);
        add_rows(team_, norm, m_.residual_scale, b_.x, b_.ldx, p_.tokens, m_.hidden, hidden_);
    }

    Team& team_;
    const Model& m_;
    const Pass& p_;
    const Buffers& b_;
    const Layer& layer_;
    const Matrix* const after_;  // what follows this layer
    const int index_;
    float* const hidden_;
};

// What enters the first layer: embeddings, or what a matrix makes of them and of states.
void enter(Team& team, const Model& m, const Pass& p, const Buffers& b) {
    const Entry& e = p.entry;
    const bool alone = !e.matrix.outputs;
    const int ld = alone ? m.hidden : b.ldx;
    float* const embedded = alone ? p.hidden : b.x;
    team.each(p.tokens, 4, [&](int t, int) {
        float* row = embedded + (size_t)t * ld;
        if (e.own) return (void)std::memcpy(row, e.own + (size_t)t * m.hidden, sizeof(float) * m.hidden);
        unpack_row(*e.embedding, e.ids[t], row);
        if (e.scale != 1.0f)
            for (int i = 0; i < m.hidden; i++) row[i] *= e.scale;
    });
    if (alone) return;
    float* const states = e.joined ? embedded + m.hidden : p.hidden;
    const int lds = e.joined ? ld : m.hidden;
    for (int piece = 0; piece < e.pieces; piece++) {
        float* to = e.fuse.outputs ? b.fused + piece * m.hidden : states;
        norm_rows(team, e.piece_norm, e.states[piece], m.hidden, p.tokens, m.hidden, to, e.fuse.outputs ? b.ldf : lds);
    }
    if (e.fuse.outputs) {
        round_inputs(team, e.fuse, b.fused, b.ldf, p.tokens);
        gemm(team, e.fuse, b.fused, b.ldf, p.tokens, states, lds, STORE);
    }
    if (e.norm.weight) norm_rows(team, e.norm, embedded, ld, p.tokens, m.hidden, embedded, ld);
    round_inputs(team, e.matrix, embedded, ld, p.tokens);
    gemm(team, e.matrix, embedded, ld, p.tokens, p.hidden, m.hidden, e.joined ? STORE : ADD);
}

void logits_of(Team& team, const Model& m, const float* hidden, int tokens, float* x, int ldx, float* logits) {
    norm_rows(team, m.norm, hidden, m.hidden, tokens, m.hidden, x, ldx, &m.head);
    gemm(team, m.head, x, ldx, tokens, logits, m.head.outputs, STORE);
    if (m.logit_scale != 1.0f || m.logit_cap)
        adjust_rows(team, m.logit_scale, m.logit_cap, tokens, m.head.outputs, logits);
}

int64_t weights(const Matrix& w) { return (int64_t)w.outputs * w.inputs; }

void run(const Model& m, const Pass& p) {
    const Buffers b(m, p);
    const int tailing = p.tokens - p.logits_from;
    int64_t work = p.logits || p.likeliest ? weights(m.head) * tailing : 0;
    if (p.first < p.last) {
        const Layer& any = m.layers[p.first];
        const int64_t layer = weights(any.qkv) + weights(any.gate_up) + weights(any.down) +
                              (int64_t)m.hidden * m.chosen * m.expert_inner * 3;
        work += layer * p.tokens * (p.last - p.first);
    }
    in_parallel(p.threads, work, [&](Team& team) {
        if (p.entry.embedding) enter(team, m, p, b);
        for (int index = p.first; index < p.last; index++) {
            const int at = index - p.first;
            const bool attend = !p.skip || !p.skip[2 * at], transform = !p.skip || !p.skip[2 * at + 1];
            LayerPass(team, m, p, b, index, p.hidden).run(attend, transform, at ? nullptr : p.beside);
            if (float* tap = p.taps ? p.taps[at] : nullptr)
                team.each(p.tokens, 4, [&](int t, int) {
                    std::copy_n(p.hidden + (size_t)t * m.hidden, m.hidden, tap + (size_t)t * m.hidden);
                });
        }
        const float* const last = p.hidden + (size_t)p.logits_from * m.hidden;
        if (p.rough) {
            norm_rows(team, m.norm, last, m.hidden, tailing, m.hidden, b.x, b.ldx);
            likeliest_rows(team, m.head, *p.rough, m.logit_scale, b.x, b.ldx, tailing, b.judged, p.likeliest);
        } else if (p.logits) {
            logits_of(team, m, last, tailing, b.x, b.ldx, p.logits);
            if (p.likeliest) judge_rows(team, p, tailing, m.head.outputs);
        }
    });
}

void head(const Model& m, const float* hidden, int tokens, int threads, float* workspace, float* logits) {
    const int ldx = row_stride(m.hidden);
    if (m.hidden % BLOCK) std::memset(workspace, 0, sizeof(float) * ldx * tokens);
    in_parallel(threads, weights(m.head) * tokens, [&](Team& team) {
        logits_of(team, m, hidden, tokens, workspace, ldx, logits);
    });
}

}  // namespace

extern const Kernels kernels;
const Kernels kernels = {packed_bytes, pack_row, unpack_row, workspace_floats, run, head, judge, draw, panel_length, multiply_add,
                         read, guide, round_row};

}  // namespace paceline::PACELINE_ISA
