// What a hidden state of the target says of the n-grams' candidates: a small network, as a plain struct that mirrors
// drafters/trigram/guided.py.
#pragma once

#include "native.h"
#include "ngrams.h"

namespace paceline {

struct Guide {
    const int8_t *embeddings, *outputs;  // of each token a row of the target's, `stride` apart, in units of its own
    const float* units;                  // of `outputs`
    int64_t tokens;
    Matrix enter, think, ask;            // see `Guide` in drafters/trigram/guide.py; think's bias is in its matrix
    const float *weigh, *weigh_bias;     // [4, inner], [4]
    int32_t hidden, rank, inner, stride;
    float* workspace;                    // guide_floats(...), 64-byte aligned
};

constexpr int GUIDED = 16;  // most positions at a time, which read the matrices once

constexpr size_t guide_floats(int hidden, int rank, int inner) {
    return GUIDED * (size_t)(row_stride(2 * hidden) + row_stride(rank) + row_stride(rank + inner) + row_stride(hidden));
}

}  // namespace paceline
