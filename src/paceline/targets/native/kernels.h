// What the sources of one instruction set share: its namespace, and the steps a pass is made of.
#pragma once

#include "native.h"
#include "team.h"

namespace paceline::PACELINE_ISA {

enum Epilogue { STORE, ADD, SWIGLU };

// Called by all threads of a team alike.
void gemm(Team& team, const Matrix& w, const float* x, int ldx, int tokens, float* y, int ldy, Epilogue epilogue);
// In place, where w.input_kind asks for it: before gemm, once for all that reads these inputs.
void round_inputs(Team& team, const Matrix& w, float* x, int ldx, int tokens);
void attention(Team& team, const Model& model, const Pass& pass, int layer, const float* q, int ldq, float* out,
               int ldo, float* parts);

size_t attention_floats(const Model& model, const Pass& pass);
size_t packed_bytes(const Matrix& w);
void pack_row(const Matrix& w, int output, const uint8_t* row, uint8_t* packed);  // floats or GGUF blocks
void unpack_row(const Matrix& w, int output, float* to);

double multiply_add(int64_t turns);                // independent fused multiply-adds; returns how many operations
double multiply_add_pairs(int64_t turns);          // of bfloat16, two to a lane
float read(const float* from, size_t count);       // streams through memory

}  // namespace paceline::PACELINE_ISA
