// What the sources of one instruction set share: its namespace, and the steps a pass is made of.
#pragma once

#include "guide.h"
#include "team.h"

namespace paceline::PACELINE_ISA {

enum Epilogue { STORE, ADD, SWIGLU, PEAKS };  // peaks: of each panel the largest output, in place of all

inline int panels_of(const Matrix& w) { return (w.outputs + PANEL - 1) / PANEL; }

// Called by all threads of a team alike: gemm.cpp; `then` is the matrix that will be needed next, or null,
void gemm(Team& team, const Matrix& w, const float* x, int ldx, int tokens, float* y, int ldy, Epilogue epilogue,
          const Matrix* then = nullptr);
// The outputs of one panel, for one token, as gemm has them.
void gemm_panel(const Matrix& w, int panel, const float* x, float* sums);
// In place, where w.input_kind asks for it: before gemm, once for all that reads these inputs. Of one token, of all.
void round_row(const Matrix& w, float* x);
void round_inputs(Team& team, const Matrix& w, float* x, int ldx, int tokens);
// attention.cpp,
void attention(Team& team, const Model& model, const Pass& pass, int layer, const float* q, int ldq, float* out,
               int ldo, float* parts);
// rows.cpp: y = norm(x) for every row, as inputs of `reader`, if there is one; hidden += scale * norm(x), which
// overwrites x;
void norm_rows(Team& team, const Norm& norm, const float* x, int ldx, int tokens, int size, float* y, int ldy,
               const Matrix* reader = nullptr);
void add_rows(Team& team, const Norm& norm, float scale, float* x, int ldx, int tokens, int size, float* hidden);
// the MLP's activation, of `wide` rows as the first matrix stores them;
void activate_rows(Team& team, const Model& model, const float* wide, int ldw, int tokens, int inner, float* y, int ldy);
// norms of heads and rotation: queries stay in `qkv`, keys and values go to the cache;
void place_heads(Team& team, const Model& model, const Layer& layer, const Pass& pass, int index, float* qkv, int ldq);
// logits, times `scale`, then cap * tanh(logit / cap) if there is a cap.
void adjust_rows(Team& team, float scale, float cap, int tokens, int size, float* logits);
// The largest of each row of logits, and what is told of them. Of one row: `logits` is as it was in the end.
void judge_rows(Team& team, const Pass& pass, int tokens, int size);
void judge(float* logits, int size, int top, int64_t* likeliest, float* logps, float* entropy);
// The entry at a quantile, in 0 .. 1 without 1, of softmax(scale * scores).
int draw(const float* scores, int size, float scale, double quantile);
// likeliest.cpp: the first of the largest outputs, times `scale` above 0, of each row of inputs, which are floats.
void likeliest_rows(Team& team, const Matrix& w, const Rough& rough, float scale, const float* x, int ldx, int tokens,
                    float* workspace, int64_t* likeliest);
size_t likeliest_floats(const Matrix& w, int tokens);  // of the workspace
float panel_length(const Matrix& w, int panel);
inline bool swiglu(const Model& model) { return model.activation == SILU && model.gated; }  // an epilogue of its own
// Floats of a row in front of another activation.
inline int wide_stride(const Model& model, int inner) {
    return swiglu(model) ? 0 : round_up((1 + model.gated) * round_up(inner, LANES), PANEL);
}
// experts.cpp: x becomes the sum of what its experts make of it, and of the shared MLP's, of which `inner` is what
// enters the second matrix.
void experts(Team& team, const Model& model, const Layer& layer, int tokens, const float* inner, int ldi,
             float* workspace, float* x, int ldx);

// One share out of `shares` of a product's outputs, for jobs of a step: `gemm` by one thread.
void gemm_share(const Matrix& w, const float* x, int ldx, int tokens, float* y, int ldy, Epilogue epilogue, int share,
                int shares);
void cap_scores(float* scores, int count, float scale, float cap);  // cap * tanh(scale * score / cap)

size_t attention_floats(const Model& model, const Pass& pass);
size_t experts_floats(const Model& model, int tokens);
size_t packed_bytes(const Matrix& w);
// Floats or GGUF blocks; returns whether all of the row's are `near`.
bool pack_row(const Matrix& w, int output, const uint8_t* row, uint8_t* packed);
void unpack_row(const Matrix& w, int output, float* to);

// guide.cpp: what may follow each of `count` tokens, GUIDED at most, gets other probabilities where there is a hidden
// state (null: none) that told of it.
void guide(const Guide& guide, const float* const* hidden, const int64_t* tokens, Successors* found, int count);
// A row in 8 bits, in a unit of its own, as it reads them.
void round_row(const float* row, int size, int8_t* to, float& unit);

double multiply_add(int64_t turns, int32_t input_kind);  // independent products and sums; how many operations
float read(const float* from, size_t count);       // streams through memory

}  // namespace paceline::PACELINE_ISA
