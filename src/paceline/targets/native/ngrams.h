// The drafter trigram's n-grams: counts of a text's own and the tables of a stored matrix, as plain structs that mirror
// drafters/trigram/structures.py, and what may follow a context.
//
// The arithmetic is that of the functions numba compiles where this library is not (drafters/trigram/search.py):
// operation by operation, so that both draft the same.
#pragma once

#include <cstdint>

namespace paceline {

constexpr int MOST_SUCCESSORS = 32;  // of a context that are looked at

struct Slot {  // of a context, in an open-addressing table
    uint64_t hash;  // 0: free
    float total;    // sum of the successors' counts
    int32_t kinds;  // how many different successors there are
    int32_t first;  // the successor seen last, an entry
};

struct Counted {
    int32_t token;
    float count;
    int32_t next;  // the successor seen before this one, or -1
};

struct Counts {
    Slot* slots;
    Counted* entries;
    int64_t* used;  // contexts and entries
    int64_t slot_count, room;
};

struct Table {  // of one order
    const uint32_t* heads;    // [vocabulary + 1]
    const void* keys;
    const uint32_t* offsets;
    const void* tokens;
    const uint8_t* codes;
    int64_t vocabulary;
    int32_t key_bytes, token_bytes;
};

struct Rule {  // how the sources are read
    double increment, max_prob, shared_scale;
    int32_t order, bits, literal;
};

struct Ngrams {  // everything one text's drafts come from
    const Table* tables;         // of order n, n - 1, ..., 2
    const float* probabilities;  // by code
    Counts own, shared;
    Rule rule;
};

struct Successors {
    int size;
    int64_t tokens[MOST_SUCCESSORS];
    double probs[MOST_SUCCESSORS];
    double own[MOST_SUCCESSORS];  // of these, what the text's own counts gave
};

// What may follow the last n - 1 tokens, -1 where there are fewer.
void find_successors(const Ngrams& ngrams, const int64_t* context, Successors& found);

}  // namespace paceline
