// Shared by the native target pass: the model as plain structs (mirrored in model.py), and what each instruction set's
// copy of the kernels offers.
//
// Every floating-point result is one fixed sequence of operations, whatever the number of tokens and threads and
// whatever the instruction set (but for amx.cpp's): that is what makes speculative decoding bit-for-bit plain decoding.
// Contraction is off; `fma` (vectors.h) and products of bfloat16 are the only fused operations. Sums of whole numbers (int8.cpp)
// are exact in any order.
//
// All sources but library.cpp, span.cpp, ngrams.cpp and search.cpp are compiled once for each instruction set, with PACELINE_ISA
// as the namespace of what they define; library.cpp chooses among them when the library is loaded.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) && defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#define PACELINE_TILES 1  // the assembler knows AMX, and how to ask the system for it is known
#endif

namespace paceline {

constexpr int LANES = 8;          // partial sums of a norm, a score or a softmax's total, on every instruction set
constexpr int PANEL = 16;         // outputs of a matrix that are stored, and computed, side by side
constexpr int BLOCK = 32;         // inputs are padded to whole blocks; also the block of the GGUF formats
constexpr int MAX_HEAD_DIM = 256;
constexpr int ROPES = 2;          // of layers with windows, and of the others
constexpr int MAX_PARTS = 3;      // matrices of a chain: at most a query's, a key's and a value's

enum Kind : int32_t { F32, BF16, Q8_0, Q4_0, Q4_1, F16, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, KINDS };

struct Matrix {  // y = W x + bias, packed by `pack_row`
    int32_t kind, outputs, inputs;
    int32_t input_kind;  // F32; inputs are rounded first: to bfloat16 (BF16), to blocks of 8 bits (Q8_0)
    int32_t near;        // Q4_1: all minima are near enough to their scales for cheaper digits; see storage.h
    const uint8_t* data;
    const float* bias;   // or null
    const Matrix* next;  // the outputs that follow, of another kind; or null
};

struct Rough {  // tells which outputs of a matrix may be the largest (likeliest.cpp)
    const Matrix* matrix;  // its weights in blocks, or blocks near them
    const float* lengths;  // of each panel's longest row, or a little more
    const float* off;      // how far each panel's rows are from their blocks, or a little more; null: not at all
};

enum Activation : int32_t { SILU, GELU, GELU_TANH, RELU_SQUARED, CLAMPED_SWIGLU };

struct Norm {  // x / rms(x) * weight + bias; centred: the mean is taken off x first
    const float *weight, *bias;  // weight null: no norm; bias null: none
    float epsilon;
    int32_t centred;
};

struct Experts {  // a mixture of them; its sum is added where an MLP's result would be
    Matrix router;
    const Matrix *gate_up, *down;  // of each; null: this layer has none
    Matrix shared_gate;            // of the MLP that all tokens pass besides; outputs 0: its result counts whole
};

struct Layer {
    Matrix qkv, out;
    Matrix gate_up, down;  // gated: panels of eight gate rows followed by their eight up rows; outputs 0: no MLP
    Experts experts;       // if there are any, the MLP is the shared one
    Norm attention_norm, attention_post_norm, mlp_norm, mlp_post_norm, query_norm, key_norm;
    const float* sinks;            // of each head: a score more in the softmax, without a value; or null
    int32_t rope;                  // which of the pass's tables rotates its heads; -1: none
    int32_t window;                // tokens that a token sees, itself included; 0: all
};

struct Model {
    int32_t hidden, heads, kv_heads, head_dim;
    int32_t rotary;                // dimensions of a head that are rotated
    int32_t inner;                 // of an MLP, at most
    int32_t activation, gated;     // gated: activation(gate) * up, but for CLAMPED_SWIGLU
    int32_t parallel;              // attention and MLP both read the layer's input
    int32_t norm_whole;            // norms of queries and keys: of all heads together, not of each
    int32_t norm_each;             // of each, with weights of its own
    int32_t norm_rotated;          // after the rotation, not before
    int32_t experts, chosen;       // of a layer; by each token
    int32_t expert_inner;
    int32_t normalised;            // the chosen ones' weights sum to 1
    int32_t ragged;                // some matrix's inputs are not whole blocks
    float scale, score_cap;        // of attention scores; a cap of 0: none
    float residual_scale;          // of what attention and MLP add
    float swiglu_alpha, swiglu_limit;  // of CLAMPED_SWIGLU
    float logit_scale, logit_cap;
    const Layer* layers;
    Norm norm;
    Matrix head;
};

struct Stored {  // a layer's keys and values, [rows, kv_heads, slots, head_dim] with these strides, in floats
    float *keys, *values;
    int64_t row_stride, head_stride;
    const int64_t* bases;  // of each row, the slot that it begins with; null: slot 0

    // From where slots are counted.
    float* at(float* from, int row, int head, int dims) const {
        return from + row * row_stride + head * head_stride - (bases ? bases[row] * dims : 0);
    }
};

struct Span {  // the new tokens of a pass: up to `width` of each of `batch` rows, row after row
    int32_t batch, width;
    int32_t offset;             // slots of the rows' draft regions that are filled already
    int32_t context;            // positions end here: padding may lie after it
    const int64_t* starts;      // of each row: the first slot of its draft region
    const int64_t* depths;      // [batch x width]: of each below that slot; null: a chain
    const uint8_t* ancestors;   // [batch x width, offset + width]: which slots of the region each sees; null: a chain
    const int64_t* counts;      // of each row: the first of its tokens that the pass is over; null: all
};

struct Entry {  // what makes that which enters the first layer
    const Matrix* embedding;    // null: it is there
    const int64_t* ids;         // [batch x width]; of a pass's tokens, once it runs
    const float* own;           // [tokens, hidden], in place of embeddings, where there is a matrix; or null
    float scale;                // of embeddings
    Norm norm;                  // of them, before the matrix
    Matrix matrix;              // outputs 0: none
    int32_t joined;             // whether it reads [embedding | state]; else the state is added to what it makes
    int32_t pieces;             // that a state is made of
    const float* const* states; // of each piece: [tokens, hidden], where there is a matrix
    Norm piece_norm;            // of each piece
    Matrix fuse;                // makes one of the pieces; outputs 0: there is one
};

struct Call {  // a pass as Python asks for it
    Span span;
    int32_t threads;
    int32_t first, last;         // of the layers, and the one after them
    int32_t logits_from;         // the first token that has logits
    int32_t unread;              // nothing reads what leaves the last layer, which then stores keys and values only
    const float *cosine[ROPES], *sine[ROPES];  // tables [positions, rotary / 2]
    const Stored* cache;         // of each layer
    Entry entry;
    const float* beside;         // [tokens, hidden], after what the first layer's attention reads, normed; or null
    float* const* taps;          // of each layer of the range: where what leaves it is copied to, or null; or null
    const uint8_t* skip;         // two flags a layer of the range: leave out its attention, its MLP; or null
    float* hidden;               // [tokens, hidden], in place
    float* logits;               // [tokens - logits_from, vocabulary], or null
    const Rough* rough;          // with it, and without logits, the likeliest are told; or null
    int32_t top;                 // how many of the likeliest are told
    int64_t* likeliest;          // [tokens - logits_from, top], of equal ones the first one first; or null
    float *logps, *entropies;    // their log-probabilities; of each of these tokens, in nats; or both null
};

struct Pass : Call {  // with all that the kernels need
    int32_t tokens;              // of all rows, without padding
    const int32_t* position;     // of each token
    const int32_t *row, *slot;   // where its key and value go
    const int32_t* prefix;       // a token's list: slots 0 .. prefix-1 of its row,
    const int32_t *extra_start, *extra;  // then extra[extra_start[t] .. extra_start[t+1]-1], its own slot last. It
                                 // sees the whole list, or the end that its layer's window leaves
    float* workspace;            // workspace_floats(...) floats, 64-byte aligned
};

struct Guide;       // guide.h
struct Successors;  // ngrams.h

struct Kernels {  // of one instruction set; see library.cpp for what each does
    size_t (*packed_bytes)(const Matrix& w);
    bool (*pack_row)(const Matrix& w, int output, const uint8_t* row, uint8_t* packed);
    void (*unpack_row)(const Matrix& w, int output, float* to);
    size_t (*workspace_floats)(const Model& model, const Pass& pass);
    void (*run)(const Model& model, const Pass& pass);
    void (*head)(const Model& model, const float* hidden, int tokens, int threads, float* workspace, float* logits);
    void (*judge)(float* logits, int size, int top, int64_t* likeliest, float* logps, float* entropy);
    int (*draw)(const float* scores, int size, float scale, double quantile);
    float (*panel_length)(const Matrix& w, int panel);
    double (*multiply_add)(int64_t turns, int32_t input_kind);
    float (*read)(const float* from, size_t count);
    void (*guide)(const Guide& guide, const float* const* hidden, const int64_t* tokens, Successors* found, int count);
    void (*round_row)(const float* row, int size, int8_t* to, float& unit);
};

const Kernels& kernels();  // of the chosen instruction set

extern const bool has_bfloat16_dots;  // the processor has AVX-512's products of bfloat16, two to a lane, and fast ones
extern const bool has_byte_dots;      // and its products of bytes, four to a lane
extern const bool has_large_l1;       // the job at hand and the next fit into its first cache
extern std::atomic<bool> use_tiles;   // passes use AMX's products of bfloat16; see amx.cpp

constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// Row stride of a GEMM's input: whole blocks, and no multiple of 4 KiB, so that rows do not fight for one cache set.
constexpr int row_stride(int inputs) {
    const int padded = round_up(inputs, BLOCK);
    return padded % 1024 ? padded : padded + LANES;
}

}  // namespace paceline
