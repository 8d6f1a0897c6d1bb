// The pass: a range of layers in place over hidden states, final norm and head; and the table of an instruction set.
// One parallel region per call; its steps (team.h) spread tokens, outputs or heads, never a sum.
#include <algorithm>
#include <cstring>

#include <omp.h>

#include "kernels.h"

namespace paceline::PACELINE_ISA {
namespace {

struct Buffers {  // inside the workspace, each row with the stride its GEMM wants
    int ldx, ldq, lda, ldi, ldw;
    float *x, *qkv, *attended, *inner, *wide, *experts, *parts;
    size_t floats;

    Buffers(const Model& model, const Pass& pass) {
        const int heads = model.heads * model.head_dim, kv = model.kv_heads * model.head_dim;
        ldx = row_stride(model.hidden * (pass.beside ? 2 : 1)), lda = row_stride(heads);
        ldq = round_up(heads + 2 * kv, PANEL), ldi = row_stride(model.inner);
        ldw = wide_stride(model, model.inner);
        float* at = pass.workspace;
        auto take = [&](size_t count) { return at += (count + 15) / 16 * 16, at - (count + 15) / 16 * 16; };
        x = take((size_t)pass.tokens * ldx);
        qkv = take((size_t)pass.tokens * ldq);
        attended = take((size_t)pass.tokens * lda);
        inner = take((size_t)pass.tokens * ldi);
        wide = take((size_t)pass.tokens * ldw);
        experts = take(experts_floats(model, pass.tokens));
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
        : team_(team), m_(m), p_(p), b_(b), layer_(m.layers[index]), index_(index), hidden_(hidden) {}

    void run(bool attend, bool transform, const float* beside) const {
        if (attend) this->attend(beside);
        if (attend && !m_.parallel) add(layer_.out, b_.attended, b_.lda, layer_.attention_post_norm);
        if (transform) enter_mlp();
        if (attend && m_.parallel) add(layer_.out, b_.attended, b_.lda, layer_.attention_post_norm);
        if (transform) leave_mlp();
    }

  private:
    void attend(const float* beside) const {
        norm_rows(team_, layer_.attention_norm, hidden_, m_.hidden, p_.tokens, m_.hidden, b_.x, b_.ldx);
        if (beside) norm_rows(team_, Norm(), beside, m_.hidden, p_.tokens, m_.hidden, b_.x + m_.hidden, b_.ldx);
        round_inputs(team_, layer_.qkv, b_.x, b_.ldx, p_.tokens);
        gemm(team_, layer_.qkv, b_.x, b_.ldx, p_.tokens, b_.qkv, b_.ldq, STORE);
        place_heads(team_, m_, layer_, p_, index_, b_.qkv, b_.ldq);
        attention(team_, m_, p_, index_, b_.qkv, b_.ldq, b_.attended, b_.lda, b_.parts);
        round_inputs(team_, layer_.out, b_.attended, b_.lda, p_.tokens);
    }

    void enter_mlp() const {
        norm_rows(team_, layer_.mlp_norm, hidden_, m_.hidden, p_.tokens, m_.hidden, b_.x, b_.ldx);
        round_inputs(team_, layer_.experts.gate_up ? layer_.experts.router : layer_.gate_up, b_.x, b_.ldx, p_.tokens);
        if (!layer_.gate_up.outputs) return;
        if (swiglu(m_)) {
            gemm(team_, layer_.gate_up, b_.x, b_.ldx, p_.tokens, b_.inner, b_.ldi, SWIGLU);
        } else {
            gemm(team_, layer_.gate_up, b_.x, b_.ldx, p_.tokens, b_.wide, b_.ldw, STORE);
            activate_rows(team_, m_, b_.wide, b_.ldw, p_.tokens, layer_.down.inputs, b_.inner, b_.ldi);
        }
        round_inputs(team_, layer_.down, b_.inner, b_.ldi, p_.tokens);
    }

    void leave_mlp() const {
        if (!layer_.experts.gate_up) return add(layer_.down, b_.inner, b_.ldi, layer_.mlp_post_norm);
        experts(team_, m_, layer_, p_.tokens, b_.inner, b_.ldi, b_.experts, b_.x, b_.ldx);
        add_rows(team_, layer_.mlp_post_norm, m_.residual_scale, b_.x, b_.ldx, p_.tokens, m_.hidden, hidden_);
    }

    // hidden += residual_scale * norm(w x): at once, where nothing is to be done on the way.
    void add(const Matrix& w, const float* x, int ldx, const Norm& norm) const {
        if (!norm.weight && m_.residual_scale == 1.0f)
            return gemm(team_, w, x, ldx, p_.tokens, hidden_, m_.hidden, ADD);
        gemm(team_, w, x, ldx, p_.tokens, b_.x, b_.ldx, STORE);
        add_rows(team_, norm, m_.residual_scale, b_.x, b_.ldx, p_.tokens, m_.hidden, hidden_);
    }

    Team& team_;
    const Model& m_;
    const Pass& p_;
    const Buffers& b_;
    const Layer& layer_;
    const int index_;
    float* const hidden_;
};

void layers(const Model& m, const Pass& p, int first, int last, const uint8_t* skip, float* hidden) {
    if (first >= last) return;
    const Buffers b(m, p);
    const Layer& any = m.layers[first];
    int64_t work = (int64_t)m.hidden * m.chosen * m.expert_inner * 3;
    for (const Matrix* w : {&any.qkv, &any.gate_up, &any.down}) work += (int64_t)w->outputs * w->inputs;
    in_parallel(p.threads, work * p.tokens * (last - first), [&](Team& team) {
        for (int index = first; index < last; index++) {
            const uint8_t* left_out = skip ? skip + 2 * (index - first) : nullptr;
            LayerPass(team, m, p, b, index, hidden)
                .run(!left_out || !left_out[0], !left_out || !left_out[1], index == first ? p.beside : nullptr);
            if (float* tap = p.taps ? p.taps[index - first] : nullptr)
                team.each(p.tokens, 4, [&](int t, int) {
                    std::copy_n(hidden + (size_t)t * m.hidden, m.hidden, tap + (size_t)t * m.hidden);
                });
        }
    });
}

void head(const Model& m, const float* hidden, int tokens, int threads, float* workspace, float* logits) {
    const int ldx = row_stride(m.hidden);
    if (m.hidden % BLOCK) std::memset(workspace, 0, sizeof(float) * ldx * tokens);
    in_parallel(threads, (int64_t)tokens * m.hidden * m.head.outputs, [&](Team& team) {
        norm_rows(team, m.norm, hidden, m.hidden, tokens, m.hidden, workspace, ldx);
        round_inputs(team, m.head, workspace, ldx, tokens);
        gemm(team, m.head, workspace, ldx, tokens, logits, m.head.outputs, STORE);
        if (m.logit_scale != 1.0f || m.logit_cap)
            adjust_rows(team, m.logit_scale, m.logit_cap, tokens, m.head.outputs, logits);
    });
}

}  // namespace

extern const Kernels kernels;
const Kernels kernels = {packed_bytes, pack_row, unpack_row, workspace_floats, layers, head, multiply_add, read};

}  // namespace paceline::PACELINE_ISA
